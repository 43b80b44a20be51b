"""CuPy as installed, on the stand-in: the runtime inside its modules is redirected before their first call.

They have NVIDIA's runtime linked into them, which asks the driver for undocumented tables. Their symbol tables name its
functions, so each can jump to the stand-in's. Only memory is changed, not the files. This file does not import CuPy.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nogpu.compiling import SimulationTooLate, SimulationUnavailable

MARK = b"\0cudaGetDeviceCount\0"
_SYMBOL_TABLE, _FUNCTION = 2, 2  # SHT_SYMTAB, STT_FUNC
_READ, _WRITE, _EXECUTE = 1, 2, 4  # of mprotect


class Function(NamedTuple):
    """A function, with its address relative to the start of the library."""

    address: int
    name: str


def carries_runtime(file: Path) -> bool:
    """True if the library has a CUDA runtime of its own, whose functions are named."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(MARK) >= 0 and any(name == "cudaGetDeviceCount" for _, name in functions(content))


def functions(content: bytes | mmap.mmap) -> Iterator[Function]:
    """The functions that an ELF file defines for itself, by its full symbol table."""
    if content[:6] != b"\x7fELF\x02\x01":
        return
    (sections,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    headers = [struct.unpack_from("<IIQQQQII", content, sections + size * index) for index in range(count)]
    for _, kind, _, _, offset, length, link, _ in headers:
        if kind != _SYMBOL_TABLE:
            continue
        names = content[headers[link][4] : headers[link][4] + headers[link][5]]
        table = content[offset : offset + length]
        for name, info, _, section, value, _ in struct.iter_unpack("<IBBHQQ", table):
            if info & 15 == _FUNCTION and section != 0:
                yield Function(value, names[name : names.index(b"\0", name)].decode())


def redirect(file: Path, runtime: Path) -> list[str]:
    """Sends the runtime's functions in a library that this process has loaded to those of the stand-in's library.

    Nothing may have called them yet, and no other thread may use the library.

    Returns:
        the names that the stand-in's library lacks. They fail as they do without a GPU.

    Raises:
        SimulationUnavailable: if the processor is not an x86-64, or if the system forbids it.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise SimulationUnavailable(
            f"CuPy on a stand-in for CUDA needs a processor of the kind x86_64; this is {platform.machine()}"
        )
    target = ctypes.CDLL(str(runtime))
    base = _base(file)
    jumps, missing = {}, []
    defined = sorted(functions(file.read_bytes()))
    begins = sorted({function.address for function in defined})
    room = {begin: after - begin for begin, after in pairwise(begins)}
    for function in defined:
        if not function.name.startswith(("cuda", "__cuda")):
            continue
        found = getattr(target, function.name, None)
        if found is None:
            missing.append(function.name)
            continue
        jump = b"\x48\xb8" + struct.pack("<Q", _address(found)) + b"\xff\xe0"  # mov rax, address; jmp rax
        if room.get(function.address, len(jump)) < len(jump):
            raise SimulationUnavailable(f"{function.name} in {file} is too short for a jump to the stand-in")
        jumps[base + function.address] = jump
    _write(jumps, file)
    return sorted(missing)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _base(file: Path) -> int:
    """The address at which the process has mapped the start of a library."""
    found = file.resolve()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, offset, _, _, *name = line.split(maxsplit=5)
        if name and int(offset, 16) == 0 and Path(name[0]) == found:
            return int(place.split("-")[0], 16)
    raise SimulationUnavailable(f"{file} is not loaded, so its runtime cannot be redirected")


def _write(jumps: dict[int, bytes], file: Path) -> None:
    """Writes into the process's own copy of the code."""
    if not jumps:
        return
    page = mmap.PAGESIZE
    first = min(jumps) // page * page
    size = (max(jumps) + page) // page * page + page - first
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(rights: int) -> None:
        if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(size), rights) != 0:
            raise SimulationUnavailable(
                f"the system forbids to change the code of {file} in memory (mprotect: error {ctypes.get_errno()}), "
                "which CuPy needs on a stand-in for CUDA"
            )

    protect(_READ | _WRITE | _EXECUTE)
    for address, jump in jumps.items():
        ctypes.memmove(address, jump, len(jump))
    protect(_READ | _EXECUTE)


PACKAGES = ("cupy", "cupy_backends", "cupyx")


def prepare(runtime: Path) -> None:
    """Sees to it that CuPy's modules call the stand-in's runtime, here and now.

    Args:
        runtime: the file of the stand-in's runtime, which is open.

    Raises:
        SimulationTooLate: if CuPy has been imported.
    """
    if any(name in sys.modules for name in PACKAGES):
        raise SimulationTooLate("CuPy has been imported already: start the stand-in before")
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(runtime))
    # CUB's kernels are in CuPy's files, compiled for GPUs. Without it CuPy reduces by kernels that it compiles.
    os.environ.setdefault("CUPY_ACCELERATORS", "")


class _Finder(MetaPathFinder):
    """Finds CuPy's extension modules as usual, with another loader for those that carry a runtime."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            file = Path(spec.loader.path)
            if carries_runtime(file):
                spec.loader = _Loader(fullname, str(file), self.runtime)
        return spec


class _Loader(importlib.machinery.ExtensionFileLoader):
    """Redirects a module between its loading and its first line."""

    def __init__(self, name: str, path: str, runtime: Path) -> None:
        super().__init__(name, path)
        self.runtime = runtime

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = super().create_module(spec)
        redirect(Path(self.path), self.runtime)
        return module
