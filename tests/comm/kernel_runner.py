"""The CUDA kernels compiled by the C++ compiler, and run on tensors of the CPU through their real tables."""

import ctypes
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dataparallel.comm
from dataparallel.comm.kernels import ADDRESSES, THREADS, KernelLaunch

SOURCE = Path(dataparallel.comm.__file__).parent / "kernels.cu"
SHIM = Path(__file__).with_name("kernel_shim.cpp")
# No contraction: the shim must round where the kernels say so.
FLAGS = ["-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"]


class Kernels:
    """The compiled kernels."""

    def __init__(self, folder: Path) -> None:
        compiler = _compiler()
        if compiler is None:
            pytest.skip("needs a C++ compiler: none of CXX, sysconfig's CXX, c++, g++ and clang++ is there")
        library = folder / "kernels.so"
        command = [*compiler, *FLAGS, "-include", str(SHIM.with_suffix(".h")), "-I", str(SOURCE.parent), str(SHIM)]
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.library = ctypes.CDLL(str(library))

    def run(
        self, launch: KernelLaunch, addresses: Sequence[int], *, threads: int = THREADS, backwards: bool = False
    ) -> None:
        name, table, *numbers, blocks = launch
        assert threads <= THREADS
        by_value = (ctypes.c_longlong * ADDRESSES)(0, *addresses)
        self.library.launch(
            getattr(self.library, name),
            ctypes.c_void_p(table.data_ptr()),
            *map(ctypes.c_longlong, numbers),
            by_value,
            ctypes.c_uint(blocks),
            ctypes.c_uint(threads),
            ctypes.c_int(backwards),
        )

    def narrow(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """The floats as the kernels round them to a 16-bit ``dtype``."""
        rounded = torch.empty(sums.shape, dtype=dtype)
        function = getattr(self.library, f"narrow_{str(dtype).removeprefix('torch.')}")
        function(ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(rounded.data_ptr()), ctypes.c_longlong(sums.numel()))
        return rounded


def _compiler() -> list[str] | None:
    named = [os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]
    for command in map(shlex.split, filter(None, named)):
        if command and shutil.which(command[0]):
            return command
    return None
