"""Compiles the simulated accelerators on first use, and loads the compiled library afterwards.

The library is kept in torch's extension cache (``TORCH_EXTENSIONS_DIR``, or ``torch_extensions`` in the user's cache
folder). The folder's name is made from the sources, torch and Python, so that a change of any of them compiles anew.
One process compiles, and others that need the library wait for it. The lock belongs to the operating system, which
releases it when the process ends. `simulate` calls this file.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["SimulationTooLate", "SimulationUnavailable", "ToolsMissing", "library_path", "load_extension"]

SOURCES = [Path(__file__).parent.parent / "csrc" / folder for folder in ("shared", "simulated")]
NAME = "dataparallel_simulated"
FLAGS = ["-O2", "-fvisibility=hidden"]
SECONDS_TO_A_DOT = 2.0

_loaded: dict[Path, ModuleType] = {}  # a second copy in one process would register its operators twice


class SimulationUnavailable(RuntimeError):
    """This machine or process cannot have simulated accelerators; the message says why and what to do."""


class ToolsMissing(SimulationUnavailable):
    """The machine lacks what compiling needs, or is no POSIX system. The only reason to skip tests."""


class SimulationTooLate(SimulationUnavailable):
    """The machine could have had them, but this process has run a backward or used CUDA before."""


def load_extension() -> ModuleType:
    """Returns the extension module, and compiles it if it is not in the cache.

    Raises:
        ToolsMissing: if it must be compiled and a compiler, ninja, setuptools or Python's headers are missing.
        SimulationUnavailable: if the compiler fails, or if the cache cannot be written.
    """
    if sys.platform == "win32":
        raise ToolsMissing("simulated accelerators need a POSIX system (Linux, macOS, WSL); this is Windows")
    library = library_path()
    if library not in _loaded:
        try:
            _loaded[library] = _find_or_build(library)
        except OSError as error:
            raise SimulationUnavailable(
                f"simulated accelerators are compiled into {library.parent}, which cannot be made or written: {error}. "
                "The environment variable TORCH_EXTENSIONS_DIR names another folder"
            ) from error
    return _loaded[library]


def library_path() -> Path:
    """Returns the file of the compiled library. A build writes to its folder only."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions"
    )
    return Path(cache, _fingerprint(), f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}")


def _find_or_build(library: Path) -> ModuleType:
    library.parent.mkdir(parents=True, exist_ok=True)
    if not library.exists():
        with _only_one(library.with_name("lock")):
            if not library.exists():
                return _build(library)
    return _import(library)


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(source for folder in SOURCES for source in folder.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    # Two environments may hold different builds of one version of torch, so the path counts too.
    for part in (torch.__version__, torch.__file__, str(sysconfig.get_config_var("EXT_SUFFIX")), *FLAGS):
        digest.update(part.encode() + b"\0")
    return f"{NAME}_{digest.hexdigest()[:16]}"


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("dataparallel: waiting for another process to compile the simulated accelerators", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _build(library: Path) -> ModuleType:
    check_tools()
    from torch.utils import cpp_extension  # imports setuptools

    for left_behind in library.parent.glob("tmp*"):  # by a process that was killed while it had the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    # torch gives the second build of a process another name, and there is a second one if the first has failed.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(NAME, None)
    scratch = tempfile.TemporaryDirectory(dir=library.parent, ignore_cleanup_errors=True)
    with scratch as scratched, path_with_ninja(), _progress():
        sources = [str(source) for folder in SOURCES for source in sorted(folder.glob("*.cpp"))]
        includes = [str(folder) for folder in SOURCES]
        try:
            module = cpp_extension.load(
                NAME, sources, extra_cflags=FLAGS, extra_include_paths=includes, build_directory=scratched
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise SimulationUnavailable(f"compiling the simulated accelerators failed: {error}") from error
        try:
            os.replace(Path(scratched, f"{NAME}.so"), library)  # atomic: no process loads half a file
        except OSError as error:  # this process has loaded the library already
            print(f"dataparallel: what is compiled cannot be kept for the next process: {error}", file=sys.stderr)
    return module


def check_tools() -> None:
    """Raises `ToolsMissing` with everything that is missing, in a sentence instead of a page of compiler output."""
    missing = []
    compiler = os.environ.get("CXX", "c++")  # as torch reads it
    if shutil.which(compiler) is None:
        missing.append(f"a C++ compiler ({compiler!r} is not on PATH; the environment variable CXX names another)")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        missing.append(f"Python's headers ({header} does not exist; packages call them python3-dev or python3-devel)")
    with path_with_ninja():
        if shutil.which("ninja") is None:
            missing.append("ninja (pip install ninja)")
    if importlib.util.find_spec("setuptools") is None:
        missing.append("setuptools (pip install setuptools)")
    if missing:
        raise ToolsMissing(
            "simulated accelerators are compiled on first use, and this machine lacks " + "; ".join(missing)
        )


@contextmanager
def path_with_ninja() -> Iterator[None]:
    """Adds the folder of Python's scripts to PATH while inside, because pip installs ninja there.

    PATH belongs to every thread of the process, so it stays as it is if ninja is on it.
    """
    if shutil.which("ninja") is not None:
        yield
        return
    before = os.environ.get("PATH")
    searched = os.defpath if before is None else before
    os.environ["PATH"] = os.pathsep.join(filter(None, [searched, sysconfig.get_path("scripts")]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


@contextmanager
def _progress() -> Iterator[None]:
    """Says on stderr that it compiles, with a dot every few seconds."""
    text = "dataparallel: compiling the simulated accelerators, once, for a minute or two "
    print(text, end="", file=sys.stderr, flush=True)
    over = threading.Event()

    def tick() -> None:
        while not over.wait(SECONDS_TO_A_DOT):
            print(".", end="", file=sys.stderr, flush=True)

    started, ticking = time.monotonic(), threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
        print(f" {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _import(library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
