"""Views of a sharded tensor, which share memory with its shards: each owner makes a view of its own shard.

After a slice or a selected row along the divided dimension each owner has those of the rows that it had before
(placement `Rows`). A view to another shape keeps the order of elements, so each shard has to hold complete rows of the
new shape. Other views need elements of several owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded import operators
from dataparallel.sharded.operators import NeedsWhole, refusal, register
from dataparallel.sharded.placements import (
    Division,
    Replicate,
    Rows,
    Shard,
    moved,
    on_this_machine,
    rows_of,
    rows_of_shards,
    shards_on_all_machines,
)
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten


@register(aten.detach.default, aten.alias.default)
def _second_object(func: OpOverload, tensor: ShardedTensor) -> ShardedTensor:
    return ShardedTensor(tensor._shards, tensor._placement, tensor.shape, tensor._devices)


@register(aten.view_as_real.default, aten.view_as_complex.default)
def _other_numbers(func: OpOverload, tensor: ShardedTensor) -> ShardedTensor:
    """Views complex numbers as pairs in a new last dimension, or such pairs as complex numbers."""
    last = tensor.dim() - (func is aten.view_as_complex.default)  # the dimension of the pairs
    if isinstance(tensor._placement, Shard) and tensor._placement.dim >= last:
        raise refusal(func, f" of shape {tuple(tensor.shape)}, where it would cut pairs in two")
    shape = (*tensor.shape, 2) if func is aten.view_as_real.default else tensor.shape[:-1]
    return ShardedTensor([func(shard) for shard in tensor._shards], tensor._placement, shape, tensor._devices)


def _on_meta(tensor: ShardedTensor) -> Tensor:
    """A tensor on meta with the same shape, strides and offset, of which views have the strides of sharded views."""
    numel = tensor.storage_offset() + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    like = torch.empty(max(numel, 1), dtype=tensor.dtype, device="meta")
    return like.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _view(tensor: ShardedTensor, shards: Sequence[Tensor], placement: Division, like: Tensor) -> ShardedTensor:
    return ShardedTensor(shards, placement, like.shape, tensor._devices, like=like)


def row_ranges(tensor: ShardedTensor) -> list[tuple[int, int]]:
    """For each shard on all machines its first row in the full tensor, and the row after its last."""
    placement = tensor._placement
    assert not isinstance(placement, Replicate)
    counts = rows_of(placement, tensor.shape[placement.dim], shards_on_all_machines(len(tensor._shards), tensor.over))
    return [(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def _each(tensor: ShardedTensor, view: Callable[[Tensor], Tensor], where: Callable[[int], int]) -> ShardedTensor:
    """Makes the same view of each shard. ``where`` maps the divided dimension to its number in the view."""
    placement = tensor._placement
    if not isinstance(placement, Replicate):
        placement = moved(placement, where(placement.dim))
    return _view(tensor, [view(shard) for shard in tensor._shards], placement, view(_on_meta(tensor)))


@register(aten.slice.Tensor)
def _slice(
    func: OpOverload,
    tensor: ShardedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> ShardedTensor:
    like = func(_on_meta(tensor), dim, start, end, step)
    dim %= tensor.dim()
    placement = tensor._placement
    if isinstance(placement, Replicate) or placement.dim != dim:
        return _each(tensor, lambda shard: func(shard, dim, start, end, step), lambda of: of)
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    cuts = []
    for begin, stop in row_ranges(tensor):
        low = max(first, begin)
        low += (first - low) % step
        cuts.append((low - begin, max(low, min(last, stop)) - begin))
    rows = tuple(len(range(low, high, step)) for low, high in cuts)
    shards = [
        func(shard, dim, low if count else 0, high if count else 0, step)
        for shard, (low, high), count in zip(
            tensor._shards, on_this_machine(cuts, tensor.over), on_this_machine(rows, tensor.over), strict=True
        )
    ]
    return _view(tensor, shards, Rows(dim, rows), like)


@register(aten.select.int)
def _select(func: OpOverload, tensor: ShardedTensor, dim: int, index: int) -> ShardedTensor:
    like = func(_on_meta(tensor), dim, index)
    dim %= tensor.dim()
    placement = tensor._placement
    if isinstance(placement, Replicate) or placement.dim != dim:
        return _each(tensor, lambda shard: func(shard, dim, index), lambda of: of - (of > dim))
    index %= tensor.shape[dim]
    ranges = row_ranges(tensor)
    owner = next(i for i, (begin, stop) in enumerate(ranges) if begin <= index < stop)
    rows = [
        func(shard, dim, index - ranges[owner][0]) if i == owner else shard.new_empty((0, *like.shape[1:]))
        for shard, i in zip(tensor._shards, on_this_machine(range(len(ranges)), tensor.over), strict=True)
    ]
    if like.dim():
        return _view(tensor, rows, Rows(0, tuple(like.shape[0] * (i == owner) for i in range(len(ranges)))), like)
    if tensor.over is not None:
        raise NeedsWhole(refusal(func, " of one dimension over machines"))
    # The element of a 0-dim tensor belongs to the first owner.
    order = sorted(range(len(rows)), key=lambda i: i != owner)
    devices = tuple(tensor._devices[i] for i in order)
    return ShardedTensor([rows[i] for i in order], Shard(0), (), devices, like=like)


@register(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: OpOverload, tensor: ShardedTensor, sizes: Any, dim: int = 0) -> list[ShardedTensor]:
    counts = [piece.shape[dim] for piece in func(_on_meta(tensor), sizes, dim)]
    ends = accumulate(counts)
    return [_slice(aten.slice.Tensor, tensor, dim, end - count, end) for end, count in zip(ends, counts, strict=True)]


@register(aten.unbind.int)
def _unbind(func: OpOverload, tensor: ShardedTensor, dim: int = 0) -> list[ShardedTensor]:
    count = len(func(_on_meta(tensor), dim))
    return [_select(aten.select.int, tensor, dim, index) for index in range(count)]


@register(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(func: OpOverload, tensor: ShardedTensor, *dims: Any) -> ShardedTensor:
    if not tensor.dim():
        return _view(tensor, tensor._shards, tensor._placement, tensor)
    numbered = func(torch.empty([*range(tensor.dim())], device="meta"), *dims).shape
    return _each(tensor, lambda shard: func(shard, *dims), [*numbered].index)


@register(aten.unsqueeze.default)
def _unsqueeze(func: OpOverload, tensor: ShardedTensor, dim: int) -> ShardedTensor:
    dim %= tensor.dim() + 1
    if not tensor.dim() and not isinstance(tensor._placement, Replicate):  # shards without the element are 1-dim
        shards = [shard if shard.dim() else func(shard, dim) for shard in tensor._shards]
        return _view(tensor, shards, tensor._placement, func(_on_meta(tensor), dim))
    return _each(tensor, lambda shard: func(shard, dim), lambda of: of + (of >= dim))


@register(aten.view.default, _torch.unsafe_view)
def _reshape(func: OpOverload, tensor: ShardedTensor, size: Sequence[int]) -> ShardedTensor:
    like = func(_on_meta(tensor), size)
    placement = tensor._placement
    if like.shape == tensor.shape:
        return _view(tensor, tensor._shards, placement, like)
    if isinstance(placement, Replicate):
        return _view(tensor, [func(shard, like.shape) for shard in tensor._shards], placement, like)
    change = f" from {tuple(tensor.shape)} to {tuple(like.shape)}"
    if not tensor.dim() or not like.dim() or placement.dim:
        raise NeedsWhole(refusal(func, change))
    row = like.shape[1:].numel()
    counts = [(stop - begin) * tensor.shape[1:].numel() for begin, stop in row_ranges(tensor)]
    if not row or any(count % row for count in counts):
        raise NeedsWhole(refusal(func, f"{change}, whose rows lie on several devices"))
    rows = [count // row for count in counts]
    shards = [
        func(shard, (count, *like.shape[1:]))
        for shard, count in zip(tensor._shards, on_this_machine(rows, tensor.over), strict=True)
    ]
    is_even = rows == rows_of_shards(like.shape[0], len(rows))
    return _view(tensor, shards, Shard(0) if is_even else Rows(0, tuple(rows)), like)


IN_PLACE = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


@register(*IN_PLACE)
def _in_place(func: OpOverload, tensor: ShardedTensor, *dims: int) -> ShardedTensor:
    """Makes the tensor a view of itself. The parameters of a module are laid out by their shapes, and keep them."""
    if isinstance(tensor, torch.nn.Parameter):
        raise refusal(func, " that are parameters")
    view = operators.run(IN_PLACE[func], (tensor, *dims), {})
    torch.Tensor.data.__set__(tensor, view)  # type: ignore[attr-defined]  # takes the shape and strides
    tensor._shards, tensor._placement = view._shards, view._placement
    return tensor
