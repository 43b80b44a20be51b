"""Reductions over all dimensions, to plain 0-dim tensors on the first owner; along some dimensions; and of lists.

Each owner reduces its shard to a partial result, and the first owner reduces these. Of a replicated tensor it reduces
its own copy. Over machines every machine gathers all partial results and reduces them in the owners' order, so all get
the same bits. A reduction along the divided dimension, but not along all others, needs full tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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


def _dims(func: OpOverload, tensor: ShardedTensor, dim: Any, none_means_all: bool = True) -> list[int]:
    dims = tensor.dim()
    if dim is None or (none_means_all and not isinstance(dim, int) and len(dim) == 0):
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


def _shaped(result: Tensor, tensor: ShardedTensor, keepdim: bool) -> Tensor:
    return result.reshape([1] * tensor.dim()) if keepdim else result


@register(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.mean.default, aten.mean.dim)
def _add_up(
    func: OpOverload,
    tensor: ShardedTensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    dims = _dims(func, tensor, dim)
    if len(dims) < tensor.dim():
        return _along(func, tensor, dims, keepdim, lambda shard: func(shard, dim, keepdim, dtype=dtype))
    is_mean = func.overloadpacket is aten.mean
    result_dtype = dtype or tensor.dtype
    is_inexact = result_dtype.is_floating_point or result_dtype.is_complex
    if is_mean and not is_inexact:
        aten.mean.default(tensor._shards[0], dtype=dtype)  # raises torch's own error
    add = aten.nansum.default if func.overloadpacket is aten.nansum else aten.sum.default
    is_exact = dtype is None and not is_inexact
    total = _partials(tensor, partial(add, dtype=None if is_exact else summed_in(result_dtype))).sum(0)
    if is_mean:
        total = total / tensor.numel()
    return _shaped(total if is_exact else total.to(result_dtype), tensor, keepdim)


@register(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.logsumexp.default,
    aten.var.correction, aten.std.correction, aten.count_nonzero.dim_IntList,
)  # fmt: skip
def _only_along(func: OpOverload, tensor: ShardedTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """Reductions whose partial results cannot be combined, so they run only along dimensions that are not divided."""
    if keepdim:  # some take it by name only, and some do not have it
        options["keepdim"] = True
    return _along(func, tensor, _dims(func, tensor, dim), keepdim, lambda shard: func(shard, dim, **options))


@register(aten.prod.default)
def _product(func: OpOverload, tensor: ShardedTensor, **options: Any) -> Tensor:
    return _partials(tensor, partial(func, **options)).prod(0, **options)


@register(aten.count_nonzero.default)
def _count(func: OpOverload, tensor: ShardedTensor, dim: int | None = None) -> Any:
    if dim is None:
        return _partials(tensor, func).sum(0)
    return _along(func, tensor, _dims(func, tensor, dim), False, lambda shard: func(shard, dim))


@register(
    aten.max.default, aten.min.default, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
)  # fmt: skip
def _extreme(func: OpOverload, tensor: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
    # For any and all an empty list of dimensions means no dimension, for amax and amin it means all.
    dims = _dims(func, tensor, dim, none_means_all=func.overloadpacket in (aten.amax, aten.amin))
    if len(dims) < tensor.dim():
        return _along(func, tensor, dims, keepdim, lambda shard: func(shard, dim, keepdim))
    simple = func.overloadpacket.default
    return _shaped(simple(_partials(tensor, simple, has_neutral=False)), tensor, keepdim)


@register(aten.linalg_vector_norm.default)
def _vector_norm(
    func: OpOverload,
    tensor: ShardedTensor,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    dims = _dims(func, tensor, dim)
    if len(dims) < tensor.dim():
        return _along(func, tensor, dims, keepdim, lambda shard: func(shard, order, dim, keepdim, dtype=dtype))
    given = dtype or tensor.dtype
    reduce = partial(torch.linalg.vector_norm, ord=order, dtype=summed_in(given))
    total = _combined_norm(_partials(tensor, reduce, has_neutral=False), order).to(given.to_real())
    return _shaped(total, tensor, keepdim)


@register(aten.norm.Scalar, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def _norm(
    func: OpOverload, tensor: ShardedTensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    dims = _dims(func, tensor, dim)
    if len(dims) < tensor.dim():
        return _along(func, tensor, dims, keepdim, lambda shard: func(shard, p, dim, keepdim, **options))
    return _vector_norm(func, tensor, 2 if p is None else p, dim, keepdim, **options)


# ---- of each tensor of a list, which clipping of gradients uses: one call for each owner ----------------------------


@register(_torch.foreach_norm)
def _norms(func: OpOverload, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    def reduce(parts: list[Tensor]) -> list[Tensor]:
        return func(parts, order, dtype=summed_in(dtype or parts[0].dtype))

    def finish(partials: Tensor, given: torch.dtype) -> Tensor:
        return _combined_norm(partials, order).to((dtype or given).to_real())

    # The norm of an empty tensor is 0. A negative order looks for the smallest value, so infinity is neutral.
    neutral = float("inf") if order < 0 else 0.0
    return _of_list(tensors, partial(func, ord=order, dtype=dtype), reduce, finish, lambda dtype: neutral)


@register(_torch.foreach_max)
def _maxima(func: OpOverload, tensors: list[Tensor]) -> list[Tensor]:
    return _of_list(tensors, func, func, lambda partials, dtype: partials.amax(0), _lowest)


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _of_list(
    tensors: list[Tensor],
    of_plain: Callable[[list[Tensor]], list[Tensor]],
    reduce: Callable[[list[Tensor]], list[Tensor]],
    finish: Callable[[Tensor, torch.dtype], Tensor],
    neutral: Callable[[torch.dtype], float],
) -> list[Tensor]:
    """The result for each tensor of the list. All partial results of an owner travel as one tensor.

    ``finish``: the results for tensors of a dtype, from the partial results, of shape (owners, tensors). ``neutral``:
    the value that stands for an empty shard of a dtype.
    """
    results: list[Any] = [None] * len(tensors)
    for group in groups_of([tensors]):
        for subgroup in _by_dtype(group) if group.templates else [group]:
            if subgroup.templates:
                owners = zip(*(_reduced_shards(tensor, neutral) for tensor in subgroup.templates), strict=True)
                partials = stack_on_first([torch.stack(reduce([*of_owner])) for of_owner in owners])
                over = subgroup.templates[0].over
                if over is not None and not isinstance(subgroup.templates[0]._placement, Replicate):
                    partials = all_gather_owners(partials, over)
                of_subgroup = [*finish(partials, subgroup.templates[0].dtype).unbind()]
            else:
                of_subgroup = of_plain([tensors[position] for position in subgroup.positions])
            for position, result in zip(subgroup.positions, of_subgroup, strict=True):
                results[position] = result
    return results


def _by_dtype(group: SameOwners) -> list[SameOwners]:
    """Divides a group by dtype, and by whether tensors are replicated: of those only the first copy is reduced."""
    by_key: dict[Any, SameOwners] = {}
    for template, position in zip(group.templates, group.positions, strict=True):
        subgroup = by_key.setdefault((template.dtype, isinstance(template._placement, Replicate)), SameOwners([], []))
        subgroup.templates.append(template)
        subgroup.positions.append(position)
    return [*by_key.values()]


def _reduced_shards(tensor: ShardedTensor, neutral: Callable[[torch.dtype], float]) -> list[Tensor]:
    if isinstance(tensor._placement, Replicate):
        return [tensor._shards[0]]
    if tensor.numel() == 0:  # torch's own result or error for an empty tensor
        return [*tensor._shards]
    return [shard if shard.numel() else shard.new_full((1,), neutral(shard.dtype)) for shard in tensor._shards]
