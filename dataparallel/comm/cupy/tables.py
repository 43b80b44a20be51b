"""The tables that tell the kernels of the cupy transport what to copy and what to sum.

This room packs pointers, counts and chunks into one table per launch, in the order that ``kernels.cu`` describes, and
lists the dtypes that kernels can sum. It launches nothing and knows no CUDA: pointers are numbers, and the table is a
CPU tensor. ``launch`` calls `pack`; ``transport`` picks the kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

THREADS = 256
"""Threads per block. The kernels are compiled for at most this number."""


class Kernel(NamedTuple):
    """The name of a kernel, and the bytes of one of its elements."""

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
"""The kernel that sums each dtype. bool and 8-bit floats have none.

A complex number is two elements. Integers wrap around, so signed and unsigned ones share a kernel. ``float16`` and
``bfloat16`` are summed in ``float32`` and rounded once.
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
    """The launch of a kernel on dense memory. It has 0 blocks if no tensor has an element.

    Args:
        kernel: `COPY_KERNEL` or one of `SUM_KERNELS`.
        pointers: rows, each with one pointer for every tensor. For copies: the sources, then each list of destinations;
            no destination overlaps a source. For sums: the results, then each slot in turn; a result overlaps nothing,
            or is one slot's tensor at the same position. A sum's pointers are multiples of the kernel's ``itemsize``.
        counts: the number of elements of every tensor. The pointer of an empty tensor is not followed.
        max_blocks: above 0; a good number is that of the blocks that the device runs at once.

    Raises:
        ValueError: a row that is not as long as ``counts``.
    """
    lengths = [len(row) for row in pointers]
    if {*lengths} != {len(counts)}:
        raise ValueError(f"every row has one pointer for each of {len(counts)} tensors; got rows of {lengths}")
    chunk = _chunk_bytes(sum(counts) * kernel.itemsize, max_blocks) // kernel.itemsize
    first_chunks = list(accumulate((-(-count // chunk) for count in counts), initial=0))
    table = torch.frombuffer(array("q", chain(*pointers, counts, first_chunks)), dtype=torch.int64)
    return Launch(kernel.name, table, len(counts), len(pointers), chunk, min(first_chunks[-1], max_blocks))


def _chunk_bytes(total: int, max_blocks: int) -> int:
    """The size of a chunk: small enough to give every block one, else large, to cost fewer searches in the table."""
    share = -(-total // max_blocks)
    return min(max(1 << (share - 1).bit_length(), _SMALLEST_CHUNK), _LARGEST_CHUNK)
