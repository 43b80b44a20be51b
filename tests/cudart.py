"""CUDA's functions by ctypes, for scripts of tests that call the stand-in for CUDA without torch.

A script runs in a process of its own, imports what it needs from here, and calls CUDA by its names:
``call("cudaSetDevice", 1)`` raises `Failed` with the name of the error, ``refused(name, function, ...)`` expects it.
"""

import ctypes
from typing import Any

from nogpu.cuda import libraries

P = ctypes.c_void_p
N = ctypes.c_size_t
TO_DEVICE, TO_HOST, BETWEEN_DEVICES, ANY = 1, 2, 3, 4
NON_BLOCKING = 1

PATH = libraries.open_libraries()
CUDA = ctypes.CDLL(str(PATH))
CUDA.cudaGetErrorName.restype = CUDA.cudaGetErrorString.restype = ctypes.c_char_p


class Failed(Exception):
    """An error of CUDA, by its name."""


def call(function: str, *arguments: Any) -> None:
    """Calls a function of CUDA's runtime."""
    error = CUDA[function](*arguments)
    if error:
        CUDA.cudaGetLastError()
        raise Failed(f"{CUDA.cudaGetErrorName(error).decode()}: {CUDA.cudaGetErrorString(error).decode()}")


def refused(error: str, function: str, *arguments: Any) -> str:
    """Calls a function that has to fail with this error, and returns the text of the error."""
    result = "cudaSuccess: "
    try:
        call(function, *arguments)
    except Failed as failed:
        result = str(failed)
    name, text = result.split(": ", 1)
    assert name == error, f"{function}: {result}"
    return text


def made(function: str, *arguments: Any, kind: Any = P) -> Any:
    """Calls a function whose first argument is where it puts its result, and returns that."""
    result = kind()
    call(function, ctypes.byref(result), *arguments)
    return result


def number(function: str, *arguments: Any) -> int:
    """The same for an int."""
    return made(function, *arguments, kind=ctypes.c_int).value


def malloc(size: int, device: int = 0) -> P:
    """Memory of a device, which is the current one afterwards."""
    call("cudaSetDevice", device)
    return made("cudaMalloc", N(size))


def after(pointer: P, size: int) -> P:
    """The address so many bytes further."""
    return P(pointer.value + size)


def read(pointer: P, size: int) -> bytes:
    """Bytes of a device."""
    buffer = ctypes.create_string_buffer(size)
    call("cudaMemcpy", buffer, pointer, N(size), TO_HOST)
    return buffer.raw
