"""Compiles the libraries that answer in the place of CUDA's, and opens them in front of CUDA's.

The dynamic loader looks for a library by its soname, and takes one of that name that the process has opened before. So
these have to be open before torch is imported. `start` calls this file.
"""

from __future__ import annotations

import ctypes

from dataparallel.testing.compiling import Library, build_library
from dataparallel.testing.cuda.extension import CSRC
from dataparallel.testing.cuda.machine import Machine
from dataparallel.testing.cuda.possible import cuda_headers

__all__ = ["open_libraries"]


def open_libraries(machine: Machine) -> None:
    """Opens them in this process, with that machine.

    Raises:
        SimulationUnavailable: if they cannot be compiled; `ToolsMissing` if there is no compiler.
    """
    runtime = Library(
        name="libcudart.so.13",
        what="libraries that stand in for CUDA's",
        folders=(CSRC / "runtime",),
        link_flags=("-Wl,-soname,libcudart.so.13",),
        include_paths=(CSRC / "runtime", cuda_headers()),
    )
    opened = ctypes.CDLL(str(build_library(runtime)), mode=ctypes.RTLD_GLOBAL)
    opened.standin_set_machine(machine.devices)
