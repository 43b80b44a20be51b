"""Kernels that copy many tensors in one launch, or sum them over the slots: `DeviceTable`, and the transport `Cupy`.

A kernel runs on one device and reads and writes the memory of its peers. `DeviceTable` executes a table of
``comm.tables``, for ``fully_shard``. The transport carries the flat buffers of whole models if a user asks for it
(``transport="cupy"``). One GPU has run the kernels; that they read peers has been seen by the stand-in for CUDA only.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, combinations, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dataparallel._torch import current_stream_at
from dataparallel.comm.buckets import travels_flat
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.streams.held import hold_for_peers
from dataparallel.comm.tables import Place, Table, TableRow, TensorRow, copies
from dataparallel.comm.transport import Allocate, Transport
from dataparallel.devices import CPU

THREADS = 256
"""Threads per block. The kernels are compiled for at most this number."""

BLOCKS = 32
"""Blocks of a launch. 32 have up to a megabyte in flight, more than an NVLink port carries in the time that a load from
a peer takes (450 GB/s, 1.5 us), and leave most of a GPU to computation."""

ADDRESSES = 480
"""Addresses that travel with a launch: with the other parameters below 4096 bytes, which every GPU takes."""

_LOWER_BITS = 48
"""A pointer in a table: the number of an address above these bits, and below them the bytes from there."""

COPY_KERNEL = "copy_many"

SUM_KERNELS: dict[tuple[torch.dtype, torch.dtype], str] = {
    (torch.float64, torch.float64): "sum_float64",
    (torch.float32, torch.float32): "sum_float32",
    (torch.float16, torch.float16): "sum_float16",
    (torch.bfloat16, torch.bfloat16): "sum_bfloat16",
    (torch.float16, torch.float32): "sum_float16_to_float32",
    (torch.bfloat16, torch.float32): "sum_bfloat16_to_float32",
    (torch.complex128, torch.complex128): "sum_float64",
    (torch.complex64, torch.complex64): "sum_float32",
}
"""The kernel that sums each dtype into a target of a dtype; others have none. A complex number is two elements.
``float16`` and ``bfloat16`` are summed in ``float32``, and rounded once if the target has 16 bits."""

_VECTOR_BYTES = 16
_SMALLEST_CHUNK = THREADS * _VECTOR_BYTES  # one vector for each thread
_LARGEST_CHUNK = 16 * _SMALLEST_CHUNK


class KernelLaunch(NamedTuple):
    """The kernel's name, its arguments (the address of ``table`` and three numbers), and how many blocks it has."""

    kernel: str
    table: Tensor
    tensors: int
    rows: int
    chunk: int
    blocks: int


def pack(table: Table, dtype: torch.dtype, target_dtype: torch.dtype, *, max_blocks: int = BLOCKS) -> KernelLaunch:
    """Prepares the launch that executes a table with terms and targets of these dtypes, for which there is a kernel.

    The launch has 0 blocks if all rows are empty. Address i + 1 is that of the table's tensor i.
    """
    terms = len(table[0].terms) if table else 1
    kernel = kernel_for(dtype, target_dtype, terms)
    assert kernel is not None
    sizes = [target_dtype.itemsize, *[dtype.itemsize] * terms]
    pointers = [
        [(place.tensor + 1 << _LOWER_BITS) + place.first * size for place in places]
        for places, size in zip(zip(*[(row.target, *row.terms) for row in table], strict=True), sizes, strict=False)
    ]
    itemsize = 1 if kernel == COPY_KERNEL else dtype.itemsize // (1 + dtype.is_complex)
    counts = [row.numel * (dtype.itemsize // itemsize) for row in table]
    # Small enough that every block gets a chunk, else large, for fewer searches in the table.
    share = -(-sum(counts) * itemsize // max_blocks)
    chunk = min(max(1 << (share - 1).bit_length(), _SMALLEST_CHUNK), _LARGEST_CHUNK) // itemsize
    first_chunks = list(accumulate((-(-count // chunk) for count in counts), initial=0))
    packed = torch.frombuffer(array("q", chain(*pointers, counts, first_chunks)), dtype=torch.int64)
    return KernelLaunch(kernel, packed, len(counts), len(pointers), chunk, min(first_chunks[-1], max_blocks))


def kernel_for(dtype: torch.dtype, target_dtype: torch.dtype, terms: int) -> str | None:
    """The kernel that copies or adds so many terms of ``dtype`` into a target; ``None`` if there is none."""
    return COPY_KERNEL if dtype == target_dtype and terms == 1 else SUM_KERNELS.get((dtype, target_dtype))


# ---- launches -------------------------------------------------------------------------------------------------------

_SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17",)
"""The compiler's options. CuPy adds ``-ftz=true``; see ``kernels.cu`` for how the kernels avoid its effect."""

# Pairs of devices whose memory torch has mapped for each other.
_reachable: set[frozenset[torch.device]] = set()


def why_not(devices: Sequence[torch.device]) -> str | None:
    """Why the kernels cannot be launched on these distinct accelerators, in words; ``None`` if they can."""
    if devices[0].type != "cuda":
        has_its_own = hasattr(torch.get_device_module(devices[0].type), "launch_rows")
        return None if has_its_own else f"the kernels are for CUDA devices, and {devices[0]} is none"
    if torch.version.hip is not None:
        return "torch is built for ROCm, on which the kernels have not been tried"
    try:
        import cupy  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        return f"CuPy cannot be imported ({type(error).__name__}: {error})"
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"it needs peer access between all devices, and {one} and {other} have none"
    return None


class DeviceTable:
    """A table of ``comm.tables`` on a device, whose kernels read peers. It serves any memory of the same sizes.

    The constructor copies the table to the device, on its current stream.

    Args:
        table: its tensors are at most ``ADDRESSES - 1``.
        device: where the kernel runs.
        dtype: of all terms.
        target_dtype: of the targets: the same, or ``float32`` for sums of 16-bit floats.
    """

    def __init__(
        self, table: Table, device: torch.device, dtype: torch.dtype, target_dtype: torch.dtype | None = None
    ) -> None:
        self.device = device
        packed = pack(table, dtype, target_dtype or dtype)
        if device.type == "cuda":
            rows = packed.table.pin_memory().to(device, non_blocking=True)
        else:
            cells = [(*row.target, row.numel, *chain(*row.terms)) for row in table]
            rows = torch.tensor(cells, dtype=torch.int64, device=CPU)
        self._packed = packed._replace(table=rows)

    def launch(self, tensors: Sequence[Tensor | None], shifts: Sequence[int] | None = None) -> None:
        """Executes the table on the current stream of its device, by one launch.

        A term whose tensor is ``None`` is left out; a row without terms stays as it is. The caller orders the stream
        after the writes of terms and before further uses of the targets, and holds all memory until then. ``shifts``:
        for each tensor, how many elements after its first one the table begins to count.
        """
        if self._packed.blocks == 0:
            return
        if self.device.type != "cuda":
            rows = self._packed.table
            torch.get_device_module(self.device.type).launch_rows(self._packed.kernel, rows, tensors, shifts)
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if shifts is not None:
            shifted = zip(addresses, tensors, shifts, strict=True)
            addresses = [at if tensor is None else at + shift * tensor.itemsize for at, tensor, shift in shifted]
        import cupy
        import numpy

        kernel, table, *numbers, blocks = self._packed
        by_value = numpy.zeros(ADDRESSES, numpy.int64)
        by_value[1 : 1 + len(addresses)] = addresses  # address 0 is 0
        # CuPy passes a structured scalar by value, and integers, and so the pointer, as 64 bits.
        arguments = (table.data_ptr(), *numbers, by_value.view(_by_value())[0])
        # CuPy's ``ExternalStream`` is deprecated from CuPy 14 on, and CuPy 13 has no other class for it.
        stream = SimpleNamespace(ptr=current_stream_at(self.device.index).native_handle)
        with cupy.cuda.Device(self.device.index):
            _function(kernel, self.device.index)((blocks,), (THREADS,), arguments, stream=stream)


def make_reachable(devices: Sequence[torch.device]) -> None:
    """Makes torch map the memory of distinct devices for each other, once for each pair.

    torch enables peer access only when it copies, and only for the device that the copy comes from. A kernel that reads
    unmapped memory breaks CUDA for the whole process. The check of ``peers`` copies too, but a user may turn it off.
    """
    for one, other in combinations(devices, 2):
        if (pair := frozenset((one, other))) not in _reachable:
            _copy(one, other)
            _copy(other, one)
            _reachable.add(pair)


def _copy(source: torch.device, target: torch.device) -> None:
    sent = torch.empty(1, dtype=torch.uint8, device=source)
    hold_for_peers([torch.empty_like(sent, device=target).copy_(sent)], [sent])


@functools.cache
def _by_value() -> Any:
    """NumPy's dtype for the addresses of a launch."""
    import numpy

    return numpy.dtype([("at", numpy.int64, ADDRESSES)])


@functools.cache
def _function(kernel: str, device_index: int) -> Any:
    """The kernel, loaded for the current device, whose index is ``device_index``. CuPy compiles the source once."""
    import cupy

    return cupy.RawModule(code=_SOURCE.read_text(encoding="utf-8"), options=OPTIONS).get_function(kernel)


class Cupy(Transport):
    """The transport by kernels, which copy and add memory of peers. torch's copies carry what they cannot."""

    def copy_each(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies with one launch on each device that receives, all at a time. Torch copies what is not contiguous."""
        if launch([row for row in copies(targets, sources) if row.target is not row.terms[0]]):
            hold_for_peers(sources, targets)
        else:
            super().copy_each(targets, sources)

    def add_terms(self, rows: Sequence[TensorRow], empty: Allocate) -> list[Tensor]:
        """Adds with one launch on each device that has targets. Torch adds in dtypes that have no kernel."""
        if launch(rows):
            return [tensor for row in rows for tensor in (row.target, *row.terms)]
        return super().add_terms(rows, empty)


def launch(rows: Sequence[TensorRow]) -> bool:
    """Executes rows by one launch on each device that has targets. False if the kernels cannot execute them.

    A launch comes after earlier work, and before later work, on the current streams of its terms' devices. It does not
    wait for the launches on other devices.
    """
    terms, targets = [term for row in rows for term in row.terms], [row.target for row in rows]
    if not all(travels_flat(tensor) and tensor.is_contiguous() for tensor in (*terms, *targets)):
        return False
    kinds = {(term.dtype, row.target.dtype, len(row.terms)) for row in rows for term in row.terms}
    if len(kinds) > 1 or any(kernel_for(*kind) is None for kind in kinds):
        return False
    streams = current_streams(tensor.device for tensor in (*terms, *targets))
    ready = {device: Event(stream) for device, stream in streams.items()}
    done: list[tuple[Event, list[torch.device]]] = []
    for device in dict.fromkeys(target.device for target in targets):
        own = [row for row in rows if row.target.device == device]
        tensors = [*(term for row in own for term in row.terms), *(row.target for row in own)]
        peers = [peer for peer in dict.fromkeys(tensor.device for tensor in tensors) if peer != device]
        make_reachable([device, *peers])
        for peer in peers:
            ready[peer].make_wait(streams[device])
        _table_of(tuple(row.target.numel() for row in own), device, *next(iter(kinds))).launch(tensors)
        done.append((Event(streams[device]), peers))
    for event, peers in done:
        for peer in peers:
            event.make_wait(streams[peer])
    # Autograd does not see writes by kernels, so this tells it that these tensors have changed.
    increment_version(targets)
    return True


@functools.lru_cache(maxsize=256)
def _table_of(
    numels: Sequence[int], device: torch.device, dtype: torch.dtype, target_dtype: torch.dtype, terms: int
) -> DeviceTable:
    """The table of rows of so many elements. The tensors are the ``terms`` of each row in turn, then the targets."""
    rows = len(numels)
    places = [[Place(at * terms + term, 0) for term in range(terms)] for at in range(rows)]
    table = [TableRow(Place(rows * terms + at, 0), tuple(places[at]), numel) for at, numel in enumerate(numels)]
    return DeviceTable(table, device, dtype, target_dtype)
