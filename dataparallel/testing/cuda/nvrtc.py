"""The stand-in for NVRTC: CUDA's sources that a program compiles while it runs are compiled for the host.

`libraries` opens it before torch is imported, so that torch and CuPy find it in NVRTC's place. The C++ is
``csrc/nvrtc``; what it compiles is run by ``csrc/runtime``.
"""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from dataparallel.testing.compiling import Library, build_library

__all__ = ["open_nvrtc"]

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
