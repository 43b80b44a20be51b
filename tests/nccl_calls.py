"""NCCL's functions by ctypes, for scripts of tests that call the stand-in for NCCL without torch.

A script runs in a process of its own and imports what it needs from here. ``nccl("ncclGroupStart")`` raises `Failed`
with NCCL's result and text, ``refused(name, text, function)`` expects it. Several processes that run a script can be
the ranks of communicators: each of them is rank `RANK` of `WORLD`.
"""

import ctypes
import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudart
from cudart import NON_BLOCKING, N, P, call, made
from nogpu.cuda import libraries

__all__ = ["RANK", "WORLD", "Buffer", "Failed", "P", "all_reduce", "communicators", "group", "join", "nccl"]
__all__ += ["N", "abort", "libraries", "new_id", "refused", "said", "shared_id", "stream"]

RESULTS = ["ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidArgument"]
RESULTS += ["ncclInvalidUsage", "ncclRemoteError", "ncclInProgress"]
TYPES = {"b": 0, "B": 1, "i": 2, "I": 3, "q": 4, "Q": 5, "f": 7, "d": 8}  # NCCL's numbers, by array's codes
SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE = range(5)

NCCL = ctypes.CDLL("libnccl.so.2")
NCCL.ncclGetLastError.restype = ctypes.c_char_p

RANK = int(os.environ.get("TEST_RANK", "0"))
WORLD = int(os.environ.get("TEST_WORLD", "1"))


class Failed(Exception):
    """A result of NCCL and its text, or an error of CUDA."""


class Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def nccl(function: str, *arguments: Any) -> None:
    """Calls a function of NCCL. Python's numbers are taken for int, so sizes have to be `N`."""
    result = NCCL[function](*arguments)
    if result:
        raise Failed(f"{RESULTS[result]}: {NCCL.ncclGetLastError(None).decode()}")


def said(function: Callable[..., Any], *arguments: Any) -> str:
    """Calls a function that has to fail, and returns what the error says."""
    try:
        function(*arguments)
    except (Failed, cudart.Failed) as failed:
        return str(failed)
    raise AssertionError(f"{function} was not refused")


def refused(expected: str, text: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function that has to fail with this result of NCCL, and with this in its text."""
    told = said(function, *arguments)
    assert told.startswith(expected + ": "), told
    assert text in told, told


class Buffer:
    """Numbers in the memory of a device, and a stream of it that other streams' work does not wait for."""

    def __init__(self, values: Any, device: int = 0, code: str = "f") -> None:
        self.device, self.code, self.count = device, code, len(values)
        host = array(code, values)
        self.size = len(host) * host.itemsize
        self.pointer = cudart.malloc(max(self.size, 1), device)
        self.stream = stream(device)
        call("cudaMemcpy", self.pointer, P(host.buffer_info()[0]), N(self.size), cudart.TO_DEVICE)

    @property
    def dtype(self) -> int:
        return TYPES[self.code]

    def get(self, on: P | None = None) -> list[Any]:
        """The numbers, copied by the stream after all that it has."""
        host = array(self.code, bytes(self.size))
        there, here = P(host.buffer_info()[0]), self.stream if on is None else on
        call("cudaSetDevice", self.device)
        call("cudaMemcpyAsync", there, self.pointer, N(self.size), cudart.TO_HOST, here)
        call("cudaStreamSynchronize", here)
        return host.tolist()


def stream(device: int) -> P:
    call("cudaSetDevice", device)
    return made("cudaStreamCreateWithFlags", NON_BLOCKING)


def communicators(*devices: int) -> list[P]:
    """Of one process."""
    result = (P * len(devices))()
    nccl("ncclCommInitAll", result, len(devices), (ctypes.c_int * len(devices))(*devices))
    return [P(each) for each in result]


def new_id() -> Id:
    result = Id()
    nccl("ncclGetUniqueId", ctypes.byref(result))
    return result


def shared_id(name: str) -> Id:
    """The same for all processes; rank 0 makes it. It returns when all have come, so that they join at one time."""
    path = Path(os.environ["TEST_FOLDER"], name)
    if RANK == 0:
        made_here = new_id()
        path.with_suffix(".part").write_bytes(bytes(made_here))
        path.with_suffix(".part").rename(path)
    path.with_suffix(f".{RANK}").touch()
    while not all(each.exists() for each in (path, *(path.with_suffix(f".{rank}") for rank in range(WORLD)))):
        time.sleep(0.005)
    return Id.from_buffer_copy(path.read_bytes())


def join(unique: Id, count: int = WORLD, rank: int = RANK, device: int = RANK) -> P:
    call("cudaSetDevice", device)
    result = P()
    nccl("ncclCommInitRank", ctypes.byref(result), count, unique, rank)
    return result


def group(*calls: Callable[[], Any]) -> None:
    nccl("ncclGroupStart")
    for each in calls:
        each()
    nccl("ncclGroupEnd")


def all_reduce(communicator: P, buffer: Buffer, op: int = SUM, on: P | None = None, to: Buffer | None = None) -> None:
    target = (to or buffer).pointer
    where = buffer.stream if on is None else on
    nccl("ncclAllReduce", buffer.pointer, target, N(buffer.count), buffer.dtype, op, communicator, where)


def abort(*comms: P) -> None:
    for each in comms:
        nccl("ncclCommAbort", each)
