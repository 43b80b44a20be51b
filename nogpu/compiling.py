"""Compiles C++ of this package on first use, and finds what is compiled afterwards.

There are two kinds: a `Library` is a plain shared library, an `Extension` a module for Python that torch compiles and
that uses torch. Both are kept in torch's extension cache (``TORCH_EXTENSIONS_DIR``, or ``torch_extensions`` in the
user's cache folder). The folder's name is made from the sources and the flags, and for an extension from torch and
Python, so that a change of any of them compiles anew. One process compiles, and others that need the result wait for
it. The lock belongs to the operating system, which releases it when the process ends.

The front ends of ``nogpu`` call this file. It knows none of them, and importing it does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar, TypeVar

__all__ = [
    "Extension",
    "Library",
    "SimulationTooLate",
    "SimulationUnavailable",
    "ToolsMissing",
    "build_library",
    "check_tools",
    "fingerprint",
    "load_extension",
    "path_of",
]

T = TypeVar("T")

PACKAGE = Path(__file__).parent

_loaded: dict[Path, ModuleType] = {}  # a second copy in one process would register its operators twice


class SimulationUnavailable(RuntimeError):
    """This machine or process cannot have simulated accelerators; the message says why and what to do."""


class ToolsMissing(SimulationUnavailable):
    """The machine lacks what they are made with, or has another system. The only reason to skip tests."""


class SimulationTooLate(SimulationUnavailable):
    """The machine could have had them, but this process has done something before that rules them out."""


@dataclass(frozen=True)
class Library:
    """A shared library that knows neither torch nor Python.

    Attributes:
        name: the name of its file.
        what: what it is, in the plural and without an article, for messages: "simulated accelerators".
        folders: all ``*.cpp`` in them are compiled together.
        flags: the compiler's.
        link_flags: the linker's.
        include_paths: where headers are. The files of those in this package count as sources.
    """

    name: str
    what: str
    folders: tuple[Path, ...]
    flags: tuple[str, ...] = ("-O2", "-fvisibility=hidden")
    link_flags: tuple[str, ...] = ()
    include_paths: tuple[Path, ...] = ()

    takes: ClassVar[str] = "less than a minute"
    """How long one is compiled, for messages."""


class Extension(Library):
    """A module for Python that uses torch: the same attributes, but ``name`` is the module's."""

    takes = "some minutes"


def load_extension(extension: Extension) -> ModuleType:
    """Returns the module, and compiles it if it is not in the cache.

    Raises:
        ToolsMissing: if it must be compiled and a compiler, ninja, setuptools or Python's headers are missing.
        SimulationUnavailable: if the compiler fails, or if the cache cannot be written.
    """
    path = path_of(extension)
    if path not in _loaded:
        find, build = partial(_import, extension.name, path), partial(_compile_by_torch, extension, path)
        _loaded[path] = _made(extension, path, find, build)
    return _loaded[path]


def build_library(library: Library) -> Path:
    """Returns the file of the library, and compiles it if it is not in the cache. It is not loaded.

    Raises:
        ToolsMissing: if it must be compiled and there is no compiler.
        SimulationUnavailable: if the compiler fails, or if the cache cannot be written.
    """
    path = path_of(library)
    return _made(library, path, lambda: path, partial(_compile_alone, library, path))


def path_of(library: Library) -> Path:
    """Returns the file of what is compiled. A build writes to its folder only."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions"
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if isinstance(library, Extension) else ""
    return Path(cache, fingerprint(library), f"{library.name}{suffix}")


def fingerprint(library: Library) -> str:
    """Returns the name of the folder that a library or extension is kept in."""
    digest = hashlib.sha256()
    for source in _read_files(library):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    parts: list[str] = []
    if isinstance(library, Extension):
        import torch

        # Two environments may hold different builds of one version of torch, so the path counts too.
        parts += [torch.__version__, torch.__file__, str(sysconfig.get_config_var("EXT_SUFFIX"))]
    parts += [*library.flags, *library.link_flags]
    parts += [str(path) for path in library.include_paths if not _is_ours(path)]
    for part in parts:
        digest.update(part.encode() + b"\0")
    return f"{library.name}_{digest.hexdigest()[:16]}"


def _read_files(library: Library) -> Iterable[Path]:
    sources = [path for folder in library.folders for path in folder.iterdir()]
    headers = [path for folder in filter(_is_ours, library.include_paths) for path in folder.glob("*.h")]
    return sorted({path for path in [*sources, *headers] if path.is_file()})


def _is_ours(path: Path) -> bool:
    return PACKAGE in path.parents


def _sources(library: Library) -> list[str]:
    return [str(source) for folder in library.folders for source in sorted(folder.glob("*.cpp"))]


def _made(library: Library, path: Path, find: Callable[[], T], build: Callable[[], T]) -> T:
    """What ``find`` returns if the file exists, otherwise what ``build`` returns, in one process at a time."""
    if sys.platform == "win32":
        raise ToolsMissing(f"{library.what} need a POSIX system (Linux, macOS, WSL); this is Windows")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with _only_one(path.with_name("lock"), library.what):
                if not path.exists():
                    return build()
        return find()
    except OSError as error:
        raise SimulationUnavailable(
            f"{library.what} are compiled into {path.parent}, which cannot be made or written: {error}. The "
            "environment variable TORCH_EXTENSIONS_DIR names another folder"
        ) from error


@contextmanager
def _only_one(path: Path, what: str) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process to compile the {what}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


@contextmanager
def _scratch(library: Library, path: Path) -> Iterator[str]:
    """A folder to compile in, with a line that says so."""
    for left_behind in path.parent.glob("tmp*"):  # by a process that was killed while it had the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    scratch = tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True)
    _say(f"compiling the {library.what}, once, which takes {library.takes}; they are kept in {path.parent}")
    with scratch as folder:
        yield folder


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"nogpu: {text}", file=sys.stderr, flush=True)


def _compile_by_torch(extension: Extension, path: Path) -> ModuleType:
    check_tools(extension)
    from torch.utils import cpp_extension  # imports setuptools

    # torch gives the second build of a process another name, and there is a second one if the first has failed.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(extension.name, None)
    with _scratch(extension, path) as folder, path_with_ninja():
        try:
            module: ModuleType = cpp_extension.load(
                extension.name,
                _sources(extension),
                extra_cflags=list(extension.flags),
                extra_ldflags=list(extension.link_flags),
                extra_include_paths=list(map(str, extension.include_paths)),
                build_directory=folder,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise SimulationUnavailable(f"compiling the {extension.what} failed: {error}") from error
        try:
            os.replace(Path(folder, f"{extension.name}.so"), path)  # atomic: no process loads half a file
        except OSError as error:  # this process has loaded the library already
            _say(f"what is compiled cannot be kept for the next process: {error}")
    return module


def _compile_alone(library: Library, path: Path) -> Path:
    check_tools(library)
    with _scratch(library, path) as folder:
        made = Path(folder, library.name)
        includes = [f"-I{folder}" for folder in library.include_paths]
        command = [_compiler(), "-std=c++17", "-fPIC", "-shared", "-pthread", *library.flags, *includes]
        command += [*_sources(library), *library.link_flags, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SimulationUnavailable(
                f"compiling the {library.what} failed: {shlex.join(command)} says: {done.stdout}{done.stderr}"
            )
        os.replace(made, path)
    return path


def _compiler() -> str:
    return os.environ.get("CXX", "c++")  # as torch reads it


def check_tools(library: Library) -> None:
    """Raises `ToolsMissing` with everything that is missing, in a sentence instead of a page of compiler output."""
    missing = []
    compiler = _compiler()
    if shutil.which(compiler) is None:
        missing.append(f"a C++ compiler ({compiler!r} is not on PATH; the environment variable CXX names another)")
    if isinstance(library, Extension):
        missing += _missing_for_torch()
    if missing:
        raise ToolsMissing(f"{library.what} are compiled on first use, and this machine lacks " + "; ".join(missing))


def _missing_for_torch() -> list[str]:
    missing = []
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        missing.append(f"Python's headers ({header} does not exist; packages call them python3-dev or python3-devel)")
    with path_with_ninja():
        if shutil.which("ninja") is None:
            missing.append("ninja (pip install ninja)")
    if importlib.util.find_spec("setuptools") is None:
        missing.append("setuptools (pip install setuptools)")
    return missing


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


def _import(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
