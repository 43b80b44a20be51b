"""The tables that tell the kernels of the cupy transport what to copy and what to sum.

This room packs pointers, counts and chunks into one table per launch, in the order that ``kernels.cu`` describes, and
knows which dtypes have a sum. It launches nothing and knows no CUDA and no tensor but the table, which is on the CPU:
pointers are numbers. ``launch`` has it pack, ``transport`` names the kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

THREADS = 256
"""Per block; the kernels are compiled for no more."""


class Kernel(NamedTuple):
    """A kernel by its name, and the bytes of what it takes for an element."""

    name: str
    itemsize: int


COPY_KERNEL = Kernel("copy_many", 1)

SUM_KERNELS: dict[torch.dtype, Kernel] = {
    torch.float64: Kernel("sum_float64", 8),
    torch.float32: Kernel("sum_float32", 4),
    torch.float16: Kernel("sum_float16", 2),
    torch.bfloat16: Kernel("sum_bfloat16", 2),
    torch.complex128: Kernel("sum_float64", 8),
    torch.complex64: Kernel("sum_float32", 4),
    torch.complex32: Kernel("sum_float16", 2),
    torch.int64: Kernel("sum_int64", 8),
    torch.uint64: Kernel("sum_int64", 8),
    torch.int32: Kernel("sum_int32", 4),
    torch.uint32: Kernel("sum_int32", 4),
    torch.int16: Kernel("sum_int16", 2),
    torch.uint16: Kernel("sum_int16", 2),
    torch.int8: Kernel("sum_int8", 1),
    torch.uint8: Kernel("sum_int8", 1),
}
"""For each dtype the kernel that sums it; bool and 8-bit floats have none.

A complex number is two elements. Integers wrap around, so that their sign does not matter. ``float16`` and ``bfloat16``
are summed in ``float32`` and rounded once.
"""

_VECTOR_BYTES = 16
_SMALLEST_CHUNK = THREADS * _VECTOR_BYTES  # one vector for each thread
_LARGEST_CHUNK = 16 * _SMALLEST_CHUNK


class Launch(NamedTuple):
    """One launch: the kernel's name, its arguments (``table`` by its pointer) and the number of blocks."""

    kernel: str
    table: Tensor
    tensors: int
    rows: int
    chunk: int
    blocks: int


def pack(kernel: Kernel, pointers: Sequence[Sequence[int]], counts: Sequence[int], *, max_blocks: int) -> Launch:
    """The launch of a kernel on memory that the caller knows to be dense; without blocks where nothing has an element.

    Args:
        kernel: `COPY_KERNEL` or one of `SUM_KERNELS`.
        pointers: rows, each with one pointer for every tensor. Copies: the sources, which no destination overlaps, then
            each list of destinations. Sums: the results, which overlap nothing, or are a slot's tensors at the same
            positions; then each slot in turn. A sum's pointers are multiples of the kernel's ``itemsize``.
        counts: the elements of every tensor, as the kernel counts them. The pointer of one without any is not followed.
        max_blocks: above 0; how many blocks the device runs at once is a good number.

    Raises:
        ValueError: ``max_blocks`` below 1, or a row that is not as long as ``counts``.
    """
    if max_blocks < 1:
        raise ValueError(f"max_blocks is the largest number of blocks to launch, at least 1; got {max_blocks}")
    lengths = [len(row) for row in pointers]
    if {*lengths} != {len(counts)}:
        raise ValueError(f"every row has one pointer for each of {len(counts)} tensors; got rows of {lengths}")
    chunk = _chunk_bytes(sum(counts) * kernel.itemsize, max_blocks) // kernel.itemsize
    first_chunks = list(accumulate((-(-count // chunk) for count in counts), initial=0))
    table = torch.frombuffer(array("q", chain(*pointers, counts, first_chunks)), dtype=torch.int64)
    return Launch(kernel.name, table, len(counts), len(pointers), chunk, min(first_chunks[-1], max_blocks))


def _chunk_bytes(total: int, max_blocks: int) -> int:
    """Chunks small enough to give every block one; large ones cost fewer searches in the table."""
    share = -(-total // max_blocks)
    return min(max(1 << (share - 1).bit_length(), _SMALLEST_CHUNK), _LARGEST_CHUNK)
