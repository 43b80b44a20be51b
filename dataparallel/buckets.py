"""Grouping tensors by device and dtype, flattening and unflattening them.

A bucket is a group of tensors that travels as one flat buffer. This room decides which tensors can be part of
one, keeps what is needed to restore shapes and strides, and does the two copies; it moves nothing between
devices. ``comm`` calls it, and whoever else moves many tensors at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT_CAP_BYTES = 10 * 2**20
"""10 MiB, the size that ``torch.nn.parallel.comm`` has used since its beginning."""

PLAIN_TYPES: set[type] = {Tensor, torch.nn.Parameter}
"""Classes of tensors that are nothing but their data; others keep what they are by travelling singly."""


class Layout(NamedTuple):
    """How one tensor lies in a flat buffer: its memory without repetition, and the shape it is seen with."""

    shape: tuple[int, ...]
    core_shape: tuple[int, ...]
    core_stride: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device: their positions in the list they came from, and their layouts."""

    indices: list[int]
    layouts: list[Layout]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one run of memory without holes or overlap, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def dense_stride(shape: Sequence[int], like_stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of ``shape`` whose dimensions lie in memory in the order of ``like_stride``."""
    stride = [0] * len(shape)
    expected = 1
    for dim in sorted(reversed(range(len(shape))), key=lambda dim: like_stride[dim]):
        stride[dim] = expected
        expected *= max(shape[dim], 1)
    return tuple(stride)


def layout_of(tensor: Tensor, *, keep_repeats: bool = True) -> Layout:
    """The layout that keeps the tensor's strides.

    Memory with holes (a strided slice) becomes dense, as with ``Tensor.clone``.

    Args:
        tensor: a strided tensor.
        keep_repeats: dimensions that are repeated (stride 0, from ``expand``) are stored once and come back repeated;
            else every element is stored.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    if tensor.is_contiguous():
        return Layout(shape, shape, stride, tensor.numel())
    core = shape
    if keep_repeats:
        core = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    if not is_dense(core, stride):
        core = shape
        stride = torch.empty_like(tensor, device="meta").stride()
    numel = 1
    for size in core:
        numel *= size
    return Layout(shape, core, stride, numel)


def travels_flat(tensor: Tensor) -> bool:
    """Whether a flat copy carries all that the tensor is.

    Subclasses, sparse and quantised tensors and tensors with Python attributes do not.
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
) -> tuple[list[Bucket], list[int]]:
    """Groups tensors into buckets of at most ``cap_bytes`` (or one tensor), in order, by device and dtype.

    Args:
        tensors: any tensors; ``candidates`` limits which of them (by position) are considered, default all.
        cap_bytes: above 0.
        keep_repeats: see `layout_of`; ``False`` where other tensors of the same shapes will be flattened too.

    Returns:
        The buckets, and the positions of tensors that have to travel singly.
    """
    if cap_bytes <= 0:
        raise ValueError(f"a bucket holds more than 0 bytes; got {cap_bytes}")
    buckets: list[Bucket] = []
    singles: list[int] = []
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[Bucket, int]] = {}
    for index in range(len(tensors)) if candidates is None else candidates:
        tensor = tensors[index]
        if not travels_flat(tensor):
            singles.append(index)
            continue
        layout = layout_of(tensor, keep_repeats=keep_repeats)
        nbytes = layout.numel * tensor.element_size()
        key = (tensor.device, tensor.dtype)
        bucket, filled = open_buckets.get(key, (None, 0))
        if bucket is None or filled + nbytes > cap_bytes:
            bucket, filled = Bucket([], []), 0
            buckets.append(bucket)
        bucket.indices.append(index)
        bucket.layouts.append(layout)
        open_buckets[key] = (bucket, filled + nbytes)
    return buckets, singles


def flatten(bucket: Bucket, tensors: Sequence[Tensor]) -> Tensor:
    """A new flat buffer with the elements of the bucket's tensors, in the order in which they lie in memory.

    ``tensors`` is the list that the bucket was planned for or, if it keeps no repeats, one with the same shapes.
    """
    return torch.cat([_flat_view(tensors[i], layout) for i, layout in zip(bucket.indices, bucket.layouts, strict=True)])


def _flat_view(tensor: Tensor, layout: Layout) -> Tensor:
    core = tensor
    if layout.core_shape != layout.shape:
        core = tensor.as_strided(layout.core_shape, tensor.stride())
    if core.stride() != layout.core_stride and core.numel() > 0:
        # A tensor planned with other strides: gradients of one parameter on two slots may differ in them.
        core = torch.empty_strided(layout.core_shape, layout.core_stride, dtype=core.dtype, device=core.device).copy_(
            core
        )
    return core.as_strided((layout.numel,), (1,), core.storage_offset())


def unflatten(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The bucket's tensors as parts of ``flat``, in the order of ``bucket.indices``.

    They share its memory but not its version counter: an in-place change of one does not make autograd
    believe that its neighbours have changed.
    """
    tensors = []
    offset = flat.storage_offset()
    for layout in bucket.layouts:
        part = flat.as_strided(layout.core_shape, layout.core_stride, offset).data
        tensors.append(part if layout.core_shape == layout.shape else part.expand(layout.shape).data)
        offset += layout.numel
    return tensors
