"""The stand-in for NVRTC: CUDA's sources that a program compiles while it runs are compiled for the host.

`start` opens it before torch is imported, so that torch and CuPy find it in NVRTC's place. The C++ is ``csrc/nvrtc``;
what it compiles is run by ``csrc/runtime``.
"""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import Iterable

from dataparallel.testing.compiling import Library, build_library
from dataparallel.testing.cuda.libraries import CSRC, include_paths
from dataparallel.testing.cuda.possible import CUDA

__all__ = ["open_nvrtc"]

SHIM = CSRC / "nvrtc" / "shim"


def open_nvrtc() -> None:
    """Compiles the library if it is not in the cache, opens it for the whole process, and tells it of the compiler.

    Raises:
        SimulationUnavailable: if it cannot be compiled; `ToolsMissing` if there is no compiler or no header of CUDA.
    """
    name = f"libnvrtc.so.{CUDA}"
    link_flags = (f"-Wl,-soname,{name}", "-Wl,--default-symver", "-Wl,-Bsymbolic-functions")
    what = "libraries that stand in for CUDA's"
    library = Library(name, what, (CSRC / "nvrtc",), ("-O2", "-Wall"), link_flags, (*include_paths(), SHIM))
    opened = ctypes.CDLL(str(build_library(library)), mode=ctypes.RTLD_GLOBAL)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    opened.standin_nvrtc_tools(_lines(compiler), str(SHIM).encode(), _lines(map(str, include_paths())))


def _lines(words: Iterable[str]) -> bytes:
    return "".join(f"{word}\n" for word in words).encode()
