"""What the process of a rank does, from the fork to its last word, and how it finds the function of the test.

The server calls `run` in the forked process. The call is a file in the run's folder, which `processes` has written:
where the function is, its arguments, and the state of the process that asks. The last word goes through a pipe.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

import torch

from dataparallel.testing.ranks import comms
from dataparallel.testing.ranks.rank import Rank
from dataparallel.testing.ranks.reports import Ended, describe


@dataclass
class Found:
    """Where a function or a class is, so that another process finds it.

    Attributes:
        module: the name of its module.
        file: the module's file; the module may be in no folder of ``sys.path``.
        name: the qualified name in the module.
        packages: the names of the module's packages, outermost first, and their folders.
    """

    module: str
    file: str | None
    name: str
    packages: dict[str, list[str]] = field(default_factory=dict)

    def load(self) -> Any:
        """The function or the class, in another process than that which has found it."""
        return attrgetter(self.name)(_module(self))


def find(thing: Any) -> Found:
    """Where another process finds a function or a class.

    Raises:
        TypeError: if it is no function or class of a module.
    """
    name = getattr(thing, "__qualname__", type(thing).__name__)
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing or module is None:
        raise TypeError(
            f"the ranks look the function up in its module, where there is no {name}: pass a function that is defined "
            "at the top of its module, without a decorator that hides its name"
        )
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" and (file is None or not os.path.exists(file)):
        raise TypeError(f"other processes look {name} up in its file, but it comes from a prompt: put it in a file")
    packages = {}
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:count]))
        packages[".".join(parts[:count])] = list(getattr(package, "__path__", []))
    return Found(module.__name__, None if file is None else os.path.abspath(file), name, packages)


def _module(found: Found) -> ModuleType:
    """The module that the test's process has under this name, made from the same file."""
    if found.module == "__main__":
        # As in torch.multiprocessing's processes: `if __name__ == "__main__":` is not for the ranks.
        assert found.file is not None
        module = _from_file("__mp_main__", found.file)
        sys.modules["__main__"] = module
        return module
    try:
        module = importlib.import_module(found.module)
        if found.file is None or _same(getattr(module, "__file__", None), found.file):
            return module
        del sys.modules[found.module]  # another file of this name
    except ImportError as error:
        if found.file is None or not _is_of(error, found):
            raise
    assert found.file is not None
    for name, folders in found.packages.items():
        if name not in sys.modules:
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = folders
    return _from_file(found.module, found.file)


def _same(one: str | None, other: str) -> bool:
    return one is not None and Path(one).exists() and Path(one).samefile(other)


def _is_of(error: ImportError, found: Found) -> bool:
    """If the module itself or one of its packages was not found, and not what it imports."""
    return error.name is not None and f"{found.module}.".startswith(f"{error.name}.")


def _from_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{file} is no file of Python that a rank can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Asks a rank for the stacks of all its threads. Users' code has its own use for the better known signals.
STACKS = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

# What takes a second or more to import. Once a rank has imported it, the server does so before it forks the next ones.
SLOW = (
    "expecttest",
    "hypothesis",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.common_utils",
)

LOST = 70  # the exit code of a rank that could not say why it ends

# A rank whose run nobody watches any more, because the fork server was killed, ends itself that long after its time.
ORPHANED = 60.0


_kept: list[TextIO] = []
"""Files that stay open until the process ends: faulthandler knows only their descriptors."""


@dataclass
class RankCall:
    """What all ranks of one run do.

    Attributes:
        found: the function.
        arguments: its pickled arguments, a tuple and a dict.
        count: how many ranks there are.
        backend: of the process group.
        comms: if the function starts with a process group.
        cuda: if each rank has a CUDA device.
        timeout: seconds.
        folder, path, variables, argv: the working folder, ``sys.path``, ``os.environ`` and ``sys.argv``.
    """

    found: Found
    arguments: bytes
    count: int
    backend: str | None
    comms: bool
    cuda: bool
    timeout: float
    folder: str
    path: list[str]
    variables: dict[str, str]
    argv: list[str]


def run(folder: str, number: int, word: int) -> NoReturn:
    """Runs the function of a run as one of its ranks, and ends the process.

    Args:
        folder: the run's.
        number: the rank.
        word: a pipe for the last word, an `Ended` that is pickled.
    """
    try:
        ended = _call(Path(folder), number)
        code = 0 if ended.how == "returned" else 1
    except BaseException as error:
        ended = describe(number, error, time.monotonic())
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    ended.imported = [name for name in SLOW if name in sys.modules]
    with suppress(OSError), open(word, "wb") as pipe:  # nobody listens any more
        pipe.write(_pickled(ended))
    # Threads, engines and libraries may not survive an orderly end of an interpreter that others wait for.
    os._exit(code)


def _call(folder: Path, number: int) -> Ended:
    call: RankCall = pickle.loads((folder / "call").read_bytes())
    _settle(folder, number, call)
    function = call.found.load()
    arguments, keywords = pickle.loads(call.arguments)
    device = torch.device("cuda", number) if call.cuda else torch.device("cpu")
    if call.cuda:
        torch.cuda.set_device(device)
    rank = Rank(number, call.count, device, [device], "processes")
    torch.manual_seed(0)
    # Longer than the test's own timeout, which shows the stacks of all ranks.
    comms.ours = comms.GroupOfRanks(f"file://{folder}/store", call.backend, call.timeout + 30)
    with comms.ours.made(rank) if call.comms else nullcontext():
        result = function(rank, *arguments, **keywords)
    return Ended(number, "returned", at=time.monotonic(), result=result)


def _settle(folder: Path, number: int, call: RankCall) -> None:
    """Makes this process like one that the test has started itself."""
    os.environ.clear()
    os.environ.update(call.variables)
    for name, value in (("RANK", number), ("WORLD_SIZE", call.count)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    own = folder / f"rank{number}"
    own.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)  # what a rank leaves there goes with the run's folder
    os.chdir(call.folder)
    sys.path[:] = call.path
    sys.argv[:] = call.argv
    random.seed(0)
    faulthandler.enable()
    stacks = (folder / f"stacks{number}").open("w")
    faulthandler.register(STACKS, stacks, all_threads=True)
    _kept.append(stacks)
    faulthandler.dump_traceback_later(call.timeout + ORPHANED, exit=True)
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks share the processors, as with torchrun


def _pickled(ended: Ended) -> bytes:
    """The last word in bytes. A result that cannot be sent is a failure that says so."""
    try:
        return pickle.dumps(ended)
    except Exception as error:
        what = (
            f"returned {type(ended.result).__name__}, which cannot be sent to the test's process "
            f"({type(error).__name__}: {error}): return plain tensors, numbers and containers of them"
        )
        return pickle.dumps(replace(ended, how="raised", what=what, result=None))
