"""The shared libraries that answer in place of CUDA's: compiled on first use, and opened before torch is imported.

The dynamic loader takes a library that is already open for any that needs one of its name (its soname), so torch's
libraries find these. This file does not import torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nogpu.compiling import (
    Library,
    SimulationTooLate,
    SimulationUnavailable,
    ToolsMissing,
    build_library,
)
from nogpu.cuda import cupy_imports, possible
from nogpu.cuda.machine import CudaMachine
from nogpu.cuda.possible import CUDA

SOURCES = Path(__file__).parents[1] / "csrc" / "nvrtc"
SHIM = SOURCES / "shim"


def open_nvrtc(name: str, what: str, include_paths: tuple[Path, ...]) -> None:
    """Compiles the library if it is not in the cache, opens it for the whole process, and tells it of the compiler.

    Args:
        name: of the library's file, by which others look for it.
        what: see `Library`.
        include_paths: where CUDA's headers are.

    Raises:
        SimulationUnavailable: if it cannot be compiled; `ToolsMissing` if there is no compiler.
    """
    link_flags = (f"-Wl,-soname,{name}", "-Wl,--default-symver", "-Wl,-Bsymbolic-functions")
    library = Library(name, what, (SOURCES,), ("-O2", "-Wall"), link_flags, (*include_paths, SHIM))
    opened = ctypes.CDLL(str(build_library(library)), mode=ctypes.RTLD_GLOBAL)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    opened.standin_nvrtc_tools(_lines(compiler), str(SHIM).encode(), _lines(map(str, include_paths)))


def _lines(words: Iterable[str]) -> bytes:
    return "".join(f"{word}\n" for word in words).encode()


CSRC = Path(__file__).parents[1] / "csrc"
WHAT = "libraries in place of CUDA's"
LINKS = {"works": 0, "missing": 1, "broken": 2}

_opened: dict[str, ctypes.CDLL] = {}


def open_libraries(machine: CudaMachine | None = None) -> Path:
    """Compiles the libraries if they are not in the cache, opens them for the whole process, and sets up the machine.

    Args:
        machine: what the devices say of themselves. Without one there are 8 devices.

    Returns:
        the file of the runtime's library, which others of the stand-in are linked to.

    Raises:
        ToolsMissing: if there is no compiler, if torch is not built for CUDA or CUDA's headers are missing.
        SimulationTooLate: if torch was imported already, or if the process has used CUDA with another machine.
        SimulationUnavailable: if the compiler fails, or if the cache cannot be written.
    """
    path = runtime()
    if not _opened:
        if "torch" in sys.modules:
            raise SimulationTooLate(
                "torch has opened CUDA's libraries already: put the stand-in in their place before torch is imported"
            )
        forwards = (_forward("libcuda.so.1", path), _forward("libnvidia-ml.so.1", path))
        for library in (path, *forwards, *_nccl(path)):
            _opened[library.name] = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        open_nvrtc(f"libnvrtc.so.{CUDA}", WHAT, include_paths())
        cupy_imports.prepare(path)
    if machine is not None:
        _set_machine(machine)
    return path


def runtime() -> Path:
    """Returns the file of the runtime's library, and compiles it if it is not in the cache. It is not opened."""
    why_not = possible.why_not_here()
    if why_not is not None:
        raise ToolsMissing(why_not)
    name = f"libcudart.so.{CUDA}"
    # torch's libraries ask for the version of each symbol too, which is called as the library is.
    symbols = ("-Wl,--default-symver", "-Wl,-Bsymbolic-functions", "-Wl,--no-undefined")
    flags, link_flags = ("-O2", "-fvisibility=hidden", "-Wall"), (f"-Wl,-soname,{name}", *symbols, "-ldl")
    headers = (*include_paths(), CSRC / "nvrtc" / "shim")
    return build_library(Library(name, WHAT, (CSRC / "runtime",), flags, link_flags, headers))


def _forward(name: str, path: Path) -> Path:
    """A library of that name without functions of its own: the runtime's, which it needs, has them."""
    link_flags = (f"-Wl,-soname,{name}", "-Wl,--no-as-needed", str(path), f"-Wl,-rpath,{path.parent}")
    return build_library(Library(name, WHAT, (CSRC / "forwards",), ("-O2",), link_flags))


def _nccl(path: Path) -> tuple[Path, ...]:
    """NCCL's library, if its headers are installed: they come with torch's wheels that need NCCL."""
    own, cuda = include_paths()
    headers = next((folder for folder in (*_in_wheels("nccl"), cuda) if (folder / "nccl.h").exists()), None)
    if headers is None:
        return ()
    link_flags = ("-Wl,-soname,libnccl.so.2", "-Wl,--no-as-needed", str(path), f"-Wl,-rpath,{path.parent}")
    flags = ("-O2", "-fvisibility=hidden", "-Wall")
    paths = (own, CSRC / "runtime", cuda, headers)
    return (build_library(Library("libnccl.so.2", WHAT, (CSRC / "nccl",), flags, link_flags, paths)),)


def include_paths() -> tuple[Path, Path]:
    """Returns where headers are: this package's, which come first for those that no wheel has, and CUDA's.

    Raises:
        ToolsMissing: if CUDA's are not there.
    """
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += [Path(f"/usr/local/cuda-{CUDA}"), Path("/usr/local/cuda")]
    folders = [*_in_wheels(f"cu{CUDA}"), *(root / "include" for root in roots)]
    for folder in folders:
        if _version_of(folder) == CUDA:
            return CSRC / "headers", folder
    raise ToolsMissing(
        f"{WHAT} are compiled with the headers of CUDA {CUDA}'s runtime, and no folder has them: pip install "
        "nvidia-cuda-runtime, or set CUDA_HOME"
    )


def _in_wheels(part: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    wheels = (spec and spec.submodule_search_locations) or ()
    return [Path(wheel, part, "include") for wheel in wheels]


def _version_of(folder: Path) -> int | None:
    try:
        text = Path(folder, "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return int(found[1]) // 1000 if found else None


def _library() -> ctypes.CDLL:
    if not _opened:
        raise SimulationUnavailable("this process has no stand-in for CUDA: call stand_in first")
    return next(iter(_opened.values()))


def _call(name: str, *arguments: Any) -> None:
    function = _library()[name]
    function.restype = ctypes.c_char_p
    message = function(*arguments)
    if message is not None:
        raise ValueError(message.decode())


def _set_machine(machine: CudaMachine) -> None:
    try:
        _call(
            "standin_set_machine",
            machine.devices,
            machine.name.encode(),
            machine.major,
            machine.minor,
            ctypes.c_size_t(machine.bytes),
            machine.processors,
            0,
        )
    except ValueError as error:
        raise SimulationTooLate(str(error)) from None


def set_link(source: int, target: int, state: str) -> None:
    """Says how a device reaches the memory of another: it "works", is "missing", or "broken" (copies arrive wrong)."""
    if state not in LINKS:
        raise ValueError(f"a link is one of {', '.join(LINKS)}; got {state!r}")
    _call("standin_set_link", source, target, LINKS[state])


def set_capacity(device: int, size: int) -> None:
    """Sets how many bytes of memory a device has."""
    _call("standin_set_capacity", device, ctypes.c_size_t(size))


@dataclass(frozen=True)
class RuntimeCounts:
    """What this process has called since it began, or since `forget_counts`.

    Attributes:
        calls: how often each function was called.
        contexts: the devices that have a context.
        kernels: those that were launched and are not computed.
        host_waits: how often the host has waited.
    """

    calls: dict[str, int]
    contexts: list[int]
    kernels: list[str]
    host_waits: int


def counts() -> RuntimeCounts:
    """Returns what this process has called."""
    function = _library()["standin_counts"]
    function.restype = ctypes.c_char_p
    return RuntimeCounts(**json.loads(function()))


def forget_counts() -> None:
    """Counts from now on. Contexts stay."""
    _library()["standin_forget_counts"]()
