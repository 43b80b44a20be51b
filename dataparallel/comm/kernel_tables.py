"""The tables that tell the kernels of the cupy transport what to copy and what to sum.

This room decides which tensors a flat copy expresses, and packs pointers, counts and chunks into one table per launch,
in the order that ``kernels.cu`` describes. It launches nothing and knows no CUDA: a table is a tensor on the CPU, and
pointers are numbers. ``comm.cupy_kernels`` calls it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.buckets import PLAIN_TYPES, is_dense, travels_flat

THREADS = 256
"""Per block; the kernels are compiled for no more."""

SUM_KERNELS: dict[torch.dtype, tuple[str, int]] = {
    torch.float64: ("sum_float64", 8),
    torch.float32: ("sum_float32", 4),
    torch.float16: ("sum_float16", 2),
    torch.bfloat16: ("sum_bfloat16", 2),
    torch.complex128: ("sum_float64", 8),
    torch.complex64: ("sum_float32", 4),
    torch.complex32: ("sum_float16", 2),
    torch.int64: ("sum_int64", 8),
    torch.uint64: ("sum_int64", 8),
    torch.int32: ("sum_int32", 4),
    torch.uint32: ("sum_int32", 4),
    torch.int16: ("sum_int16", 2),
    torch.uint16: ("sum_int16", 2),
    torch.int8: ("sum_int8", 1),
    torch.uint8: ("sum_int8", 1),
}
"""For each dtype the kernel that sums it, and the bytes of what that kernel takes for an element.

A complex number is two elements. Integers wrap around, so that their sign does not matter.
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


class Plan(NamedTuple):
    """What to launch, none where nothing has to move; and the positions that must travel another way."""

    launches: list[Launch]
    left: list[int]


def plan_copies(sources: Sequence[Tensor], destinations: Sequence[Sequence[Tensor]], *, max_blocks: int) -> Plan:
    """One launch that copies each source into the tensor at its position in every list of ``destinations``.

    A position is left where memory has holes or repeats itself, where strides differ, or where a tensor is more than
    its data (see `dataparallel.buckets.travels_flat`).

    Args:
        sources: tensors of any dtypes, which lie anywhere in memory. No destination overlaps any of them.
        destinations: lists as long as ``sources``, with the same shapes and dtypes.
        max_blocks: above 0; how many blocks the device runs at once is a good number.

    Raises:
        ValueError: lists of different lengths, shapes or dtypes that differ (the message says which).
    """
    rows = [sources, *destinations]
    _check_lengths(rows, "sources", "destinations")
    flat, left = _flat_positions(rows, "sources", "destinations")
    if not flat or not destinations:
        return Plan([], left)
    counts = [sources[i].numel() * sources[i].itemsize for i in flat]
    return Plan([pack("copy_many", _pointers(rows, flat), counts, 1, max_blocks=max_blocks)], left)


def plan_sums(slots: Sequence[Sequence[Tensor]], out: Sequence[Tensor], *, max_blocks: int) -> Plan:
    """One launch per dtype that sums the tensors of all slots, in slot order, into those of ``out``.

    ``float16`` and ``bfloat16`` are summed in ``float32`` and rounded once. A position is left for the reasons that
    `plan_copies` has, where the dtype has no sum (bool, 8-bit floats), or where memory is not aligned to its elements.

    Args:
        slots: at least one list of tensors, all as long as ``out``, with the same shapes and dtypes.
        out: tensors that overlap no other, or that are a slot's tensor at the same position.
        max_blocks: above 0; how many blocks the device runs at once is a good number.

    Raises:
        ValueError: no slot, lists of different lengths, shapes or dtypes that differ (the message says which).
    """
    if not slots:
        raise ValueError("a sum needs the tensors of at least one slot; got none")
    rows = [out, *slots]
    _check_lengths(rows, "out", "slots")
    flat, left = _flat_positions(rows, "out", "slots")
    by_kernel: dict[tuple[str, int], tuple[list[tuple[int, ...]], list[int]]] = {}
    for index, column in zip(flat, zip(*_pointers(rows, flat), strict=True), strict=True):
        tensor = out[index]
        kernel = SUM_KERNELS.get(tensor.dtype)
        if kernel is None or any(pointer % kernel[1] for pointer in column):
            left.append(index)
            continue
        columns, counts = by_kernel.setdefault(kernel, ([], []))
        columns.append(column)
        counts.append(tensor.numel() * (tensor.itemsize // kernel[1]))
    launches = [
        pack(name, list(zip(*columns, strict=True)), counts, itemsize, max_blocks=max_blocks)
        for (name, itemsize), (columns, counts) in by_kernel.items()
    ]
    return Plan(launches, sorted(left))


def pack(
    kernel: str, pointers: Sequence[Sequence[int]], counts: Sequence[int], itemsize: int, *, max_blocks: int
) -> Launch:
    """The launch of a kernel on memory that the caller knows to be dense: nothing is checked.

    Args:
        kernel: ``copy_many``, or a name from `SUM_KERNELS`.
        pointers: rows, each with one pointer for every tensor. Copies: the sources, then each list of destinations.
            Sums: the results, then each slot.
        counts: for every tensor its bytes (copies) or its elements (sums), above 0.
        itemsize: the bytes of what ``counts`` counts.
        max_blocks: above 0.
    """
    if max_blocks < 1:
        raise ValueError(f"max_blocks is the largest number of blocks to launch, at least 1; got {max_blocks}")
    chunk = _chunk_bytes(sum(counts) * itemsize, max_blocks) // itemsize
    first_chunks = list(accumulate((-(-count // chunk) for count in counts), initial=0))
    table = torch.frombuffer(array("q", chain(*pointers, counts, first_chunks)), dtype=torch.int64)
    return Launch(kernel, table, len(counts), len(pointers), chunk, min(first_chunks[-1], max_blocks))


def _pointers(rows: Sequence[Sequence[Tensor]], indices: Sequence[int]) -> list[list[int]]:
    return [[*map(Tensor.data_ptr, map(row.__getitem__, indices))] for row in rows]


def _chunk_bytes(total: int, max_blocks: int) -> int:
    """Chunks small enough to give every block one; large ones cost fewer searches in the table."""
    share = -(-total // max_blocks)
    return min(max(1 << (share - 1).bit_length(), _SMALLEST_CHUNK), _LARGEST_CHUNK)


def _flat_positions(rows: Sequence[Sequence[Tensor]], first: str, others: str) -> tuple[list[int], list[int]]:
    """The positions where a flat copy expresses all rows, without those that hold no element; and those where not."""
    if _all_plain(rows):
        return [index for index, tensor in enumerate(rows[0]) if tensor.numel() > 0], []
    flat: list[int] = []
    left: list[int] = []
    for index, group in enumerate(zip(*rows, strict=True)):
        if any(tensor.is_nested for tensor in group):
            left.append(index)
            continue
        _check_alike(group, index, first, others)
        if group[0].numel() > 0:
            (flat if _lie_alike(group) else left).append(index)
    return flat, left


def _all_plain(rows: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all are contiguous and nothing but their data, with the shapes and dtypes of the first row.

    That is the usual case, and for thousands of tensors it is several times as fast to ask one question of all than all
    questions of one.
    """
    dtypes = [tensor.dtype for tensor in rows[0]]
    if any(tensor.is_quantized for tensor in rows[0]):
        return False
    for row in rows:
        if not {*map(type, row)} <= PLAIN_TYPES or any(tensor.is_nested for tensor in row):
            return False
        if not {tensor.layout for tensor in row} <= {torch.strided} or not all(map(Tensor.is_contiguous, row)):
            return False
        if any(tensor.__dict__ for tensor in row) or any(map(Tensor.is_neg, row)) or any(map(Tensor.is_conj, row)):
            return False
        if [tensor.dtype for tensor in row] != dtypes:
            return False
    shapes = [tensor.shape for tensor in rows[0]]
    return all([tensor.shape for tensor in row] == shapes for row in rows[1:])


def _lie_alike(group: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape have their elements in one run of memory each, in the same order."""
    if not all(map(travels_flat, group)):
        return False
    if all(tensor.is_contiguous() for tensor in group):
        return True
    shape = group[0].shape
    # The stride of a dimension of size 1 means nothing.
    steps = {tuple(step for step, size in zip(tensor.stride(), shape, strict=True) if size != 1) for tensor in group}
    return len(steps) == 1 and is_dense(shape, group[0].stride())


def _check_lengths(rows: Sequence[Sequence[Tensor]], first: str, others: str) -> None:
    for number, row in enumerate(rows[1:]):
        if len(row) != len(rows[0]):
            raise ValueError(f"{others}[{number}] has {len(row)} tensors, {first} has {len(rows[0])}")


def _check_alike(group: Sequence[Tensor], index: int, first: str, others: str) -> None:
    shape, dtype = group[0].shape, group[0].dtype
    for number, tensor in enumerate(group[1:]):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{others}[{number}][{index}] has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                f"{first}[{index}] {tuple(shape)} and {dtype}"
            )
