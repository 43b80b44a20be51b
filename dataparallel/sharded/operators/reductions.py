"""Reductions over all elements, to plain 0-dim tensors on the first owner, and norms of lists of tensors.

Each owner reduces its shard to a partial result, and the first owner reduces these. Of a replicated tensor it reduces
its own copy. Over machines every machine gathers all partial results and reduces them in the owners' order, so all get
the same bits. Reductions along some dimensions need full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.comm.tables import summed_in
from dataparallel.sharded.operators import NeedsWhole, refusal, register
from dataparallel.sharded.operators.pointwise import scalar_value
from dataparallel.sharded.placements import Replicate, shard_shapes
from dataparallel.sharded.shards import all_gather_owners, stack_on_first
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten


def _partials(tensor: ShardedTensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """The partial results, stacked on the first owner's device. Of 0-dim and replicated tensors there is one.

    Empty shards are left out. If all are empty, torch decides what the reduction of an empty tensor is.
    """
    shards, over = tensor._shards, tensor.over
    if not tensor.dim() or isinstance(tensor._placement, Replicate):
        return stack_on_first([reduce(shards[0] if tensor.dim() else scalar_value(tensor))])
    if over is None or tensor.numel() == 0:
        return stack_on_first([reduce(shard) for shard in shards if shard.numel()] or [reduce(shards[0])])
    # Every owner sends a result. The result of an owner with an empty shard is left out afterwards.
    not_empty = [shard if shard.numel() else shard.new_ones([1] * shard.dim()) for shard in shards]
    partials = all_gather_owners(stack_on_first([*map(reduce, not_empty)]), over)
    shapes = shard_shapes(tensor.shape, tensor._placement, len(partials))
    return partials[[i for i, shape in enumerate(shapes) if shape.numel()]]


@register(aten.sum.default, aten.mean.default)
def _add_up(func: OpOverload, tensor: ShardedTensor, *, dtype: torch.dtype | None = None) -> Tensor:
    result_dtype = dtype or tensor.dtype
    if not (result_dtype.is_floating_point or result_dtype.is_complex):
        if func is aten.mean.default:
            func(tensor._shards[0], dtype=dtype)  # raises torch's own error
        return _partials(tensor, partial(aten.sum.default, dtype=dtype)).sum(0, dtype=dtype)
    total = _partials(tensor, partial(aten.sum.default, dtype=summed_in(result_dtype))).sum(0)
    return (total / tensor.numel() if func is aten.mean.default else total).to(result_dtype)


@register(aten.max.default, aten.min.default, aten.any.default, aten.all.default)
@register(aten.amax.default, aten.amin.default)
def _extreme(func: OpOverload, tensor: ShardedTensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    if dim or keepdim:
        raise NeedsWhole(refusal(func, " along some dimensions"))
    return func(_partials(tensor, func))


@register(aten.linalg_vector_norm.default)
def _vector_norm(
    func: OpOverload,
    tensor: ShardedTensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dim is not None or keepdim:
        raise NeedsWhole(refusal(func, " along some dimensions"))
    return _norms(_torch.foreach_norm, [tensor], order, dtype)[0]


@register(_torch.foreach_norm)
def _norms(func: OpOverload, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each tensor, for the clipping of gradients. All partial results of an owner travel as one tensor."""
    first = next(tensor for tensor in tensors if isinstance(tensor, ShardedTensor))
    key = _alike(first)
    alike = [tensor for tensor in tensors if _alike(tensor) == key]
    others = [tensor for tensor in tensors if _alike(tensor) != key]
    of_others = iter(func(others, order, dtype=dtype) if others else [])
    dtype = dtype or first.dtype
    owners = zip(*(_shards_with_norms(tensor, order) for tensor in alike), strict=True)  # type: ignore[arg-type]
    partials = stack_on_first([torch.stack(func([*shards], order, dtype=summed_in(dtype))) for shards in owners])
    if first.over is not None and not isinstance(first._placement, Replicate):
        partials = all_gather_owners(partials, first.over)
    # The norm of a tensor is that of the norms of its shards. Norm 0 is a count, so it is summed.
    combined = torch.linalg.vector_norm(partials, 1 if order == 0 else order, dim=0)
    norms = iter(combined.to(dtype.to_real()).unbind())
    return [next(norms if _alike(tensor) == key else of_others) for tensor in tensors]


def _alike(tensor: Tensor) -> Any:
    """Equal for sharded tensors that one call of each owner takes. Of a replicated one only the first copy counts."""
    if not isinstance(tensor, ShardedTensor):
        return None
    return tensor._devices, tensor.dtype, isinstance(tensor._placement, Replicate)


def _shards_with_norms(tensor: ShardedTensor, order: float) -> Sequence[Tensor]:
    """The shards, with a neutral element in the place of those that are empty."""
    if isinstance(tensor._placement, Replicate):
        return tensor._shards[:1]
    if tensor.numel() == 0:  # torch's own result or error for an empty tensor
        return tensor._shards
    # The norm of an empty tensor is 0. A negative order looks for the smallest value, so infinity is neutral.
    neutral = float("inf") if order < 0 else 0.0
    return [shard if shard.numel() else shard.new_full((1,), neutral) for shard in tensor._shards]
