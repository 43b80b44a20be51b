"""Compiles the simulated accelerators on first use, and finds them compiled afterwards.

What is compiled is kept in torch's extension cache (``TORCH_EXTENSIONS_DIR``, or ``torch_extensions`` in the user's
cache folder) under a name made from the sources, torch and Python, so that a change of any is another build. Processes
that want it at once wait for the first one; the lock belongs to the operating system and goes with its process.
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

__all__ = ["SimulationTooLate", "SimulationUnavailable", "ToolsMissing", "load_extension"]

SOURCES = Path(__file__).with_name("csrc")
NAME = "dataparallel_simulated"
FLAGS = ["-O2", "-fvisibility=hidden"]
SECONDS_TO_A_DOT = 2.0

_loaded: dict[Path, ModuleType] = {}  # a second copy in one process would register everything twice


class SimulationUnavailable(RuntimeError):
    """This machine or process cannot have simulated accelerators; the message says why and what to do."""


class ToolsMissing(SimulationUnavailable):
    """The machine lacks what compiling needs, or is no POSIX system: a reason to skip tests, as no other one is."""


class SimulationTooLate(SimulationUnavailable):
    """The machine could have had them, but this process has run a backward or used CUDA before."""


def load_extension() -> ModuleType:
    """The extension module, compiled if this is the first time.

    Raises:
        ToolsMissing: if it has to be compiled and a compiler, ninja, setuptools or Python's headers are missing.
        SimulationUnavailable: if the compiler refuses, or the folder for what is compiled cannot be written.
    """
    if sys.platform == "win32":
        raise ToolsMissing("simulated accelerators need a POSIX system (Linux, macOS, WSL); this is Windows")
    cache = _cache() / _fingerprint()
    library = cache / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library not in _loaded:
        try:
            _loaded[library] = _find_or_build(library)
        except OSError as error:
            raise SimulationUnavailable(
                f"simulated accelerators are compiled into {cache}, which cannot be made or written: {error}. The "
                "environment variable TORCH_EXTENSIONS_DIR names another folder"
            ) from error
    return _loaded[library]


def _find_or_build(library: Path) -> ModuleType:
    library.parent.mkdir(parents=True, exist_ok=True)
    if not library.exists():
        with _only_one(library.with_name("lock")):
            if not library.exists():
                return _build(library)
    return _import(library)


def _cache() -> Path:
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    # Two environments may hold different builds of one version of torch, so its place counts too.
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
        yield  # closing the file ends the lock


def _build(library: Path) -> ModuleType:
    _check_tools()
    from torch.utils import cpp_extension  # imports setuptools

    for left_behind in library.parent.glob("tmp*"):  # by a process that was killed: the lock is ours now
        shutil.rmtree(left_behind, ignore_errors=True)
    # torch gives the second build of a process another name, and the first may have failed.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(NAME, None)
    scratch = tempfile.TemporaryDirectory(dir=library.parent, ignore_cleanup_errors=True)
    with scratch as folder, _path_with_ninja(), _progress():
        sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
        try:
            module = cpp_extension.load(NAME, sources, extra_cflags=FLAGS, build_directory=folder)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise SimulationUnavailable(f"compiling the simulated accelerators failed: {error}") from error
        try:
            os.replace(Path(folder, f"{NAME}.so"), library)  # whoever sees the file sees all of it
        except OSError as error:  # it is loaded already, which is enough for this process
            print(f"dataparallel: what is compiled cannot be kept for the next process: {error}", file=sys.stderr)
    return module


def _check_tools() -> None:
    """Raises `ToolsMissing` that names what is missing, before the compiler would in a page of text."""
    missing = []
    compiler = os.environ.get("CXX", "c++")  # as torch reads it
    if shutil.which(compiler) is None:
        missing.append(f"a C++ compiler ({compiler!r} is not on PATH; the environment variable CXX names another)")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        missing.append(f"Python's headers ({header} does not exist; packages call them python3-dev or python3-devel)")
    with _path_with_ninja():
        if shutil.which("ninja") is None:
            missing.append("ninja (pip install ninja)")
    if importlib.util.find_spec("setuptools") is None:
        missing.append("setuptools (pip install setuptools)")
    if missing:
        raise ToolsMissing(
            "simulated accelerators are compiled on first use, and this machine lacks " + "; ".join(missing)
        )


@contextmanager
def _path_with_ninja() -> Iterator[None]:
    """A ninja that pip has installed lies beside Python, which need not be on PATH.

    PATH belongs to every thread of the process, so it changes only where it has to.
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
    """Says on stderr what takes so long, with a dot now and then."""
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
