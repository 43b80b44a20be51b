"""`Bucket`: a group of tensors of one device and dtype that travels as one flat buffer.

`plan_buckets` groups tensors, `flatten` makes the buffer, `unflatten` splits it. Nothing here moves between devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.replica_parameter import ReplicaParameter

DEFAULT_CAP_BYTES = 10 * 2**20
"""10 MiB, the size that ``torch.nn.parallel.comm`` has used since its beginning."""

SMALL_BYTES = 2**16
"""Tensors of a batch with at most so many bytes travel together: a copy of each would cost the host more than packing
them costs the device."""

PLAIN_TYPES: frozenset[type] = frozenset({Tensor, torch.nn.Parameter, ReplicaParameter})
"""Classes of tensors that are only data. Tensors of other classes travel singly, so that they keep their class."""


class FlatLayout(NamedTuple):
    """How one tensor lies in a flat buffer. Repeated dimensions are stored once, with size 1 in ``core_shape``.

    ``numel`` counts the stored elements. ``row_major`` is True if they lie in the order of a contiguous tensor.
    """

    shape: tuple[int, ...]
    core_shape: tuple[int, ...]
    core_stride: tuple[int, ...]
    numel: int
    row_major: bool


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device, by their positions in a list, in the order of the flat buffer.

    ``runs`` has each layout with the number of tensors that share it. These tensors are neighbours, so `unflatten`
    splits a run in one step: its cost depends on the number of layouts more than on the number of tensors.
    """

    indices: list[int]
    runs: list[tuple[FlatLayout, int]]

    @cached_property
    def layouts(self) -> list[FlatLayout]:
        """The layout of each tensor."""
        return [layout for layout, count in self.runs for _ in range(count)]

    @property
    def numel(self) -> int:
        """The number of elements of the flat buffer."""
        return sum(layout.numel * count for layout, count in self.runs)

    @classmethod
    def of(cls, members: Sequence[tuple[int, FlatLayout]]) -> Bucket:
        """A bucket of tensors given by position and layout. The bucket chooses their order."""
        by_layout: dict[FlatLayout, list[int]] = {}
        for index, layout in members:
            by_layout.setdefault(layout, []).append(index)
        # Sizes with the largest power of two as a factor come first: each tensor is as aligned as its size allows.
        runs = sorted(by_layout.items(), key=lambda run: -(run[0].numel & -run[0].numel))
        indices = [index for _, members in runs for index in members]
        return cls(indices, [(layout, len(members)) for layout, members in runs])

    @classmethod
    def row_major_of(cls, tensors: Sequence[Tensor], positions: Iterable[int]) -> Bucket:
        """A bucket in which each tensor lies in the order of a contiguous one, whatever its strides are."""
        return cls.of([(i, layout_of(torch.empty(tensors[i].shape, device="meta"))) for i in positions])


Planned: TypeAlias = tuple[list[Bucket], list[int]]
"""The result of `plan_buckets`."""


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements fill one stretch of memory without holes or overlap, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def layout_of(tensor: Tensor, *, keep_repeats: bool = True) -> FlatLayout:
    """The layout that keeps the tensor's strides. Memory with holes becomes dense, as with ``Tensor.clone``.

    ``keep_repeats``: dimensions of stride 0, from ``expand``, are stored once and come back repeated.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    if tensor.is_contiguous():
        return FlatLayout(shape, shape, stride, tensor.numel(), True)
    core = shape
    if keep_repeats:
        core = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    if not is_dense(core, stride):
        core = shape
        stride = torch.empty_like(tensor, device="meta").stride()
    return FlatLayout(shape, core, stride, math.prod(core), False)


def has_strides(tensor: Tensor) -> bool:
    """True unless the tensor is sparse, nested or of another layout without strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def travels_flat(tensor: Tensor) -> bool:
    """True if a flat copy of the data is a full copy of the tensor.

    False for subclasses, for sparse, quantised, nested and lazily conjugated tensors, and for tensors with Python
    attributes.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.__dict__
        and not (tensor.is_conj() or tensor.is_neg())
    )


def plan_buckets(
    tensors: Sequence[Tensor],
    cap_bytes: int = DEFAULT_CAP_BYTES,
    *,
    candidates: Iterable[int] | None = None,
    keep_repeats: bool = True,
) -> Planned:
    """Groups tensors into buckets of at most ``cap_bytes`` (or one tensor), in order, by device and dtype.

    Returns the buckets, and the positions of tensors that have to travel singly. ``candidates``: the positions of the
    tensors to group. ``keep_repeats``: see `layout_of`; False if the buckets will flatten other tensors too.
    """
    filled: list[list[tuple[int, FlatLayout]]] = []
    singles: list[int] = []
    # For each device and dtype the members of the bucket that is being filled, and their bytes.
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[tuple[int, FlatLayout]], int]] = {}
    layouts: dict[tuple[torch.Size, tuple[int, ...]], FlatLayout] = {}
    for index in range(len(tensors)) if candidates is None else candidates:
        tensor = tensors[index]
        if not travels_flat(tensor):
            singles.append(index)
            continue
        shape = tensor.shape, tensor.stride()
        layout = layouts.get(shape)
        if layout is None:
            layout = layouts[shape] = layout_of(tensor, keep_repeats=keep_repeats)
        nbytes = layout.numel * tensor.itemsize
        key = (tensor.device, tensor.dtype)
        members, held = open_buckets.get(key, (None, 0))
        if members is None or held + nbytes > cap_bytes:
            members, held = [], 0
            filled.append(members)
        members.append((index, layout))
        open_buckets[key] = (members, held + nbytes)
    return [Bucket.of(members) for members in filled], singles


def fill_buckets(
    tensors: Sequence[Tensor], order: Iterable[int], first_cap_bytes: int, cap_bytes: int
) -> list[list[int]]:
    """Positions in groups of one device and dtype, of at most ``cap_bytes`` (or one tensor), in the given order.

    It looks only at sizes: `plan_buckets` says how a group travels. The first group has at most ``first_cap_bytes``,
    and each later group may have twice the bytes of the group before. A group of more than a quarter of ``cap_bytes``
    takes at most half of the remaining bytes, so that the last groups are smaller again.
    """
    order = list(order)
    left = sum([tensors[index].numel() * tensors[index].itemsize for index in order])
    filled: list[list[int]] = []
    next_cap = first_cap_bytes
    # For each device and dtype the group that is being filled, its cap, and its bytes.
    open_groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], int, int]] = {}
    for index in order:
        tensor = tensors[index]
        nbytes = tensor.numel() * tensor.itemsize
        kind = (tensor.device, tensor.dtype)
        group, cap, held = open_groups.get(kind, (None, 0, 0))
        if group is None or held + nbytes > cap:
            group, held = [], 0
            cap, next_cap = min(next_cap, cap_bytes), min(2 * next_cap, cap_bytes)
            cap = min(cap, max(cap_bytes // 4, left // 2))
            filled.append(group)
        group.append(index)
        left -= nbytes
        open_groups[kind] = group, cap, held + nbytes
    return filled


def flatten(bucket: Bucket, tensors: Sequence[Tensor], own: bool = True) -> Tensor:
    """A flat buffer with the elements of the bucket's tensors, in the order in which they lie in memory.

    A single tensor is not copied unless the buffer is to have memory of its ``own``.

    ``tensors`` is the list that the bucket was planned for. If the bucket keeps no repeats, it may also be another list
    with the same shapes.
    """
    if len(bucket.indices) == 1:
        view = _flat_view(tensors[bucket.indices[0]], bucket.layouts[0])
        return view.clone() if own else view
    return _torch.flatten_dense_tensors(
        [
            tensors[index] if layout.row_major else _flat_view(tensors[index], layout)
            for index, layout in zip(bucket.indices, bucket.layouts, strict=True)
        ]
    )


def _flat_view(tensor: Tensor, layout: FlatLayout) -> Tensor:
    core = tensor
    if layout.core_shape != layout.shape:
        core = tensor.as_strided(layout.core_shape, tensor.stride())
    if core.stride() != layout.core_stride and core.numel() > 0:
        # The bucket was planned for other strides: gradients of one parameter on two slots may differ in them.
        core = torch.empty_strided(layout.core_shape, layout.core_stride, dtype=core.dtype, device=core.device).copy_(
            core
        )
    return core.as_strided((layout.numel,), (1,), core.storage_offset())


def unflatten(bucket: Bucket, flat: Tensor, *, own: bool = False) -> list[Tensor]:
    """The bucket's tensors as parts of ``flat``, in the order of ``bucket.indices``, or with memory of their ``own``.

    Without ``own`` they share the memory of ``flat``, but autograd does not take them for views. Each has its own
    version counter, so an in-place change of one part does not look like a change of its neighbours.
    """
    parts: list[Tensor] = []
    offset = flat.storage_offset()
    flat = flat.detach()
    # This runs below the dispatch key that makes views of tensors that share memory.
    with _torch.without_view_tracking():
        for layout, count in bucket.runs:
            size, stride = layout.core_shape, layout.core_stride
            members = flat.as_strided((count, *size), (layout.numel, *stride), offset)
            if own and layout.row_major:
                run: Sequence[Tensor] = torch.ops.aten.unbind_copy.int(members)  # its copies are contiguous
            else:
                run = [*map(torch.clone, members.unbind())] if own else members.unbind()
            parts.extend(run if size == layout.shape else (part.expand(layout.shape) for part in run))
            offset += count * layout.numel
    return parts


def send_packed(
    by_slot: Sequence[Sequence[Tensor]], sizes: Sequence[int], send: Callable[[int, Bucket, Sequence[Tensor]], Tensor]
) -> list[list[Tensor]]:
    """Sends each slot its chunks, cut alike from small tensors, in a flat buffer for each dtype.

    Each chunk that arrives has memory of its own: forward may resize it, or keep it. Chunks of one of the ``sizes`` are
    alike. ``send`` takes the number of a slot, a bucket and the slot's chunks, and returns the flat buffer there.
    """
    plans: dict[int, list[Bucket]] = {}
    received = [[*chunks] for chunks in by_slot]
    for slot, (chunks, size) in enumerate(zip(by_slot, sizes, strict=True)):
        if size not in plans:
            plans[size], _ = plan_buckets(chunks, keep_repeats=False)
        for bucket in plans[size]:
            arrived = unflatten(bucket, send(slot, bucket, chunks), own=True)
            for index, chunk in zip(bucket.indices, arrived, strict=True):
                received[slot][index] = chunk
    return received
