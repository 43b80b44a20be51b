"""Reductions over all dimensions, to plain 0-dim tensors on the first owner; along some dimensions; and norms of lists.

Each owner reduces its shard to a partial result, and the first owner reduces these. Of a replicated tensor it reduces
its own copy. Over machines every machine gathers all partial results and reduces them in the owners' order, so all get
the same bits. A reduction along the divided dimension, but not along all others, needs full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.comm.tables import summed_in
from dataparallel.sharded.operators import NeedsWhole, refusal, register
from dataparallel.sharded.operators.layout import scalar_value
from dataparallel.sharded.operators.lists import SameOwners, groups_of
from dataparallel.sharded.placements import Replicate, moved, shard_shapes
from dataparallel.sharded.shards import all_gather_owners, stack_on_first
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten


def _combined_norm(partials: Tensor, order: float) -> Tensor:
    """The norm of a tensor from the norms of its shards, along dimension 0. Norm 0 is a count, so it is summed."""
    return torch.linalg.vector_norm(partials, 1 if order == 0 else order, dim=0)


def _partials(tensor: ShardedTensor, reduce: Callable[[Tensor], Tensor], has_neutral: bool = True) -> Tensor:
    """The partial results, stacked on the first owner's device. Of 0-dim and replicated tensors there is one.

    ``has_neutral``: the result of an empty shard does not change the total. Otherwise empty shards are left out. If all
    are empty, torch decides what the reduction of an empty tensor is.
    """
    shards, over = tensor._shards, tensor.over
    if isinstance(tensor._placement, Replicate):
        return stack_on_first([reduce(shards[0])])
    if tensor.dim() == 0:
        return stack_on_first([reduce(scalar_value(tensor))])
    if over is None or tensor.numel() == 0:
        reduced = shards if has_neutral else [shard for shard in shards if shard.numel()] or shards[:1]
        return stack_on_first([reduce(shard) for shard in reduced])
    # Every owner sends a result. The result of an owner with an empty shard is left out afterwards.
    not_empty = [shard if shard.numel() else shard.new_ones([1] * shard.dim()) for shard in shards]
    partials = all_gather_owners(stack_on_first([*map(reduce, not_empty)]), over)
    shapes = shard_shapes(tensor.shape, tensor._placement, len(partials))
    return partials[[i for i, shape in enumerate(shapes) if shape.numel()]]


Whole: TypeAlias = "Callable[[OpOverload, ShardedTensor, dict[str, Any]], Tensor]"
"""Reduces over all dimensions to a 0-dim tensor. Its last argument has the operator's other arguments, by name."""


def _reduces(*overloads: OpOverload) -> Callable[[Whole | None], None]:
    """Registers reductions. ``None`` for those whose partial results cannot be combined.

    Along dimensions that are not divided each owner reduces its own shard, and the result is sharded.
    """

    def put(whole: Whole | None) -> None:
        def reduction(func: OpOverload, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
            named = dict(zip(_names(func), args, strict=False)) | kwargs
            dims, keepdim = _dims(func, tensor, named.get("dim")), named.get("keepdim", False)
            if len(dims) < tensor.dim() or whole is None:
                return _along(func, tensor, dims, keepdim, lambda shard: func(shard, *args, **kwargs))
            total = whole(func, tensor, named)
            return total.reshape([1] * tensor.dim()) if keepdim else total

        register(*overloads)(reduction)

    return put


@cache
def _names(func: OpOverload) -> list[str]:
    return [argument.name for argument in _torch.schema_of(func).arguments[1:]]


def _dims(func: OpOverload, tensor: ShardedTensor, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions to reduce. No dimension means all, but for any and all an empty list means none."""
    dims = tensor.dim()
    if dim is None or (dim == [] and func.overloadpacket not in (aten.any, aten.all)):
        return [*range(dims)]
    given = [dim] if isinstance(dim, int) else [*dim]
    if any(not -max(dims, 1) <= d < max(dims, 1) for d in given):
        raise IndexError(f"{func}: a tensor of shape {tuple(tensor.shape)} has no dimensions {given}")
    return sorted({d % dims for d in given}) if dims else []


def _along(
    func: OpOverload, tensor: ShardedTensor, dims: list[int], keepdim: bool, reduce: Callable[[Tensor], Any]
) -> Any:
    """Reduces each shard along dimensions that are not divided. The result is sharded."""
    placement: Any = tensor._placement
    if not isinstance(placement, Replicate):
        if placement.dim in dims or not tensor.dim():
            why = f" along dimensions {dims} of one that is divided along {placement.dim}"
            raise NeedsWhole(refusal(func, why))
        placement = placement if keepdim else moved(placement, placement.dim - sum(d < placement.dim for d in dims))
    shape = [1 if d in dims else size for d, size in enumerate(tensor.shape) if keepdim or d not in dims]
    results = [reduce(shard) for shard in tensor._shards]
    if isinstance(results[0], Tensor):
        return ShardedTensor(results, placement, shape, tensor._devices)
    return tuple(ShardedTensor(shards, placement, shape, tensor._devices) for shards in zip(*results, strict=True))


_reduces(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.logsumexp.default,
    aten.var.correction, aten.std.correction, aten.count_nonzero.dim_IntList,
)(None)  # fmt: skip


@_reduces(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.mean.default, aten.mean.dim)
def _add_up(func: OpOverload, tensor: ShardedTensor, named: dict[str, Any]) -> Tensor:
    is_mean, dtype = func.overloadpacket is aten.mean, named.get("dtype")
    result_dtype = dtype or tensor.dtype
    is_inexact = result_dtype.is_floating_point or result_dtype.is_complex
    if is_mean and not is_inexact:
        aten.mean.default(tensor._shards[0], dtype=dtype)  # raises torch's own error
    add = aten.nansum.default if func.overloadpacket is aten.nansum else aten.sum.default
    is_exact = dtype is None and not is_inexact
    total = _partials(tensor, partial(add, dtype=None if is_exact else summed_in(result_dtype))).sum(0)
    if is_mean:
        total = total / tensor.numel()
    return total if is_exact else total.to(result_dtype)


@_reduces(aten.prod.default)
def _product(func: OpOverload, tensor: ShardedTensor, named: dict[str, Any]) -> Tensor:
    return _partials(tensor, partial(func, **named)).prod(0, **named)


@_reduces(aten.count_nonzero.default)
def _count(func: OpOverload, tensor: ShardedTensor, named: dict[str, Any]) -> Tensor:
    return _partials(tensor, func).sum(0)


@_reduces(
    aten.max.default, aten.min.default, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
)  # fmt: skip
def _extreme(func: OpOverload, tensor: ShardedTensor, named: dict[str, Any]) -> Tensor:
    simple = func.overloadpacket.default
    return simple(_partials(tensor, simple, has_neutral=False))


@_reduces(aten.linalg_vector_norm.default)
def _vector_norm(func: OpOverload, tensor: ShardedTensor, named: dict[str, Any]) -> Tensor:
    order, dtype = named.get("ord", 2), named.get("dtype") or tensor.dtype
    reduce = partial(torch.linalg.vector_norm, ord=order, dtype=summed_in(dtype))
    return _combined_norm(_partials(tensor, reduce, has_neutral=False), order).to(dtype.to_real())


# ---- the norm of each tensor of a list, which clipping of gradients uses: one call for each owner --------------------


@register(_torch.foreach_norm)
def _norms(func: OpOverload, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """All partial results of an owner travel as one tensor, of shape (tensors,)."""
    results: list[Any] = [None] * len(tensors)
    for group in chain.from_iterable(map(_by_dtype, groups_of([tensors]))):
        if group.templates:
            first = group.templates[0]
            owners = zip(*(_shards_with_norms(tensor, order) for tensor in group.templates), strict=True)
            wide = summed_in(dtype or first.dtype)
            partials = stack_on_first([torch.stack(func([*of_owner], order, dtype=wide)) for of_owner in owners])
            if first.over is not None and not isinstance(first._placement, Replicate):
                partials = all_gather_owners(partials, first.over)
            norms = _combined_norm(partials, order).to((dtype or first.dtype).to_real()).unbind()
        else:
            norms = func([tensors[position] for position in group.positions], order, dtype=dtype)
        for position, norm in zip(group.positions, norms, strict=True):
            results[position] = norm
    return results


def _by_dtype(group: SameOwners) -> list[SameOwners]:
    """Divides a group by dtype, and by whether tensors are replicated: of those only the first copy is reduced."""
    if not group.templates:
        return [group]
    by_key: dict[Any, SameOwners] = {}
    for template, position in zip(group.templates, group.positions, strict=True):
        subgroup = by_key.setdefault((template.dtype, isinstance(template._placement, Replicate)), SameOwners([], []))
        subgroup.templates.append(template)
        subgroup.positions.append(position)
    return [*by_key.values()]


def _shards_with_norms(tensor: ShardedTensor, order: float) -> Sequence[Tensor]:
    """The shards, with a neutral element in the place of those that are empty."""
    if isinstance(tensor._placement, Replicate):
        return tensor._shards[:1]
    if tensor.numel() == 0:  # torch's own result or error for an empty tensor
        return tensor._shards
    # The norm of an empty tensor is 0. A negative order looks for the smallest value, so infinity is neutral.
    neutral = float("inf") if order < 0 else 0.0
    return [shard if shard.numel() else shard.new_full((1,), neutral) for shard in tensor._shards]
