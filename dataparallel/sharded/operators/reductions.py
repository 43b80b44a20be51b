"""Reductions: of whole sharded tensors to plain 0-dim tensors on the first owner, along dimensions, and of lists.

Each owner reduces its part, the first owner reduces what they send; of replicated tensors it reduces its own copy. Over
machines every machine gets what all owners have found and reduces it in their order, so results have the same bits
everywhere. A reduction along the divided dimension and not all others needs whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import NeedsWhole, refusal, register
from dataparallel.sharded.operators.layout import scalar_value
from dataparallel.sharded.operators.lists import Group, groups_of
from dataparallel.sharded.placements import Replicate, moved, shard_shapes
from dataparallel.sharded.shards import all_gather_owners, stack_on_first
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of results of parts: 16-bit floats are rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _combined_norm(partials: Tensor, order: float) -> Tensor:
    """The norm of a whole from those of its parts, along dimension 0. Norm 0 counts, so it is added up."""
    return torch.linalg.vector_norm(partials, 1 if order == 0 else order, dim=0)


def _partials(tensor: ShardedTensor, reduce: Callable[[Tensor], Tensor], has_neutral: bool = True) -> Tensor:
    """The results of parts, stacked on the first owner's device. Of 0-dim and replicated tensors it is one result.

    Args:
        reduce: the reduction of a part to a 0-dim tensor.
        has_neutral: the reduction of nothing changes no other result. Else parts without elements are left out; if none
            has any, it is for torch to say what a reduction of nothing is.
    """
    shards, over = tensor._shards, tensor.over
    if isinstance(tensor._placement, Replicate):
        return stack_on_first([reduce(shards[0])])
    if tensor.dim() == 0:
        return stack_on_first([reduce(scalar_value(tensor))])
    if over is None or tensor.numel() == 0:
        parts = shards if has_neutral else [part for part in shards if part.numel()] or shards[:1]
        return stack_on_first([reduce(part) for part in parts])
    # Every owner sends a result, also one whose part is empty. That is left out afterwards.
    full = [part if part.numel() else part.new_ones([1] * part.dim()) for part in shards]
    found = all_gather_owners(stack_on_first([*map(reduce, full)]), over)
    shapes = shard_shapes(tensor.shape, tensor._placement, len(found))
    return found[[i for i, shape in enumerate(shapes) if shape.numel()]]


def _dims(func: OpOverload, tensor: ShardedTensor, dim: Any, none_means_all: bool = True) -> list[int]:
    """The dimensions that are reduced, not negative."""
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
    """The reduction of parts along dimensions that are not divided: a sharded result."""
    placement: Any = tensor._placement
    if not isinstance(placement, Replicate):
        if placement.dim in dims or not tensor.dim():
            why = f" along dimensions {dims} of one that is divided along {placement.dim}"
            raise NeedsWhole(refusal(func, why))
        placement = placement if keepdim else moved(placement, placement.dim - sum(d < placement.dim for d in dims))
    shape = [1 if d in dims else size for d, size in enumerate(tensor.shape) if keepdim or d not in dims]
    parts = [reduce(shard) for shard in tensor._shards]
    if isinstance(parts[0], Tensor):
        return ShardedTensor(parts, placement, shape, tensor._devices)
    return tuple(ShardedTensor(of_one, placement, shape, tensor._devices) for of_one in zip(*parts, strict=True))


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
        return _along(func, tensor, dims, keepdim, lambda part: func(part, dim, keepdim, dtype=dtype))
    is_mean = func.overloadpacket is aten.mean
    result_dtype = dtype or tensor.dtype
    is_inexact = result_dtype.is_floating_point or result_dtype.is_complex
    if is_mean and not is_inexact:
        aten.mean.default(tensor._shards[0], dtype=dtype)  # raises torch's own error
    add = aten.nansum.default if func.overloadpacket is aten.nansum else aten.sum.default
    is_exact = dtype is None and not is_inexact
    total = _partials(tensor, partial(add, dtype=None if is_exact else _summed_in(result_dtype))).sum(0)
    if is_mean:
        total = total / tensor.numel()
    return _shaped(total if is_exact else total.to(result_dtype), tensor, keepdim)


@register(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.logsumexp.default,
    aten.var.correction, aten.std.correction, aten.count_nonzero.dim_IntList,
)  # fmt: skip
def _only_along(func: OpOverload, tensor: ShardedTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """Reductions that cannot be put together from those of parts."""
    if keepdim:  # of some it is given by name only, and some have none
        options["keepdim"] = True
    return _along(func, tensor, _dims(func, tensor, dim), keepdim, lambda part: func(part, dim, **options))


@register(aten.prod.default)
def _product(func: OpOverload, tensor: ShardedTensor, **options: Any) -> Tensor:
    return _partials(tensor, partial(func, **options)).prod(0, **options)


@register(aten.count_nonzero.default)
def _count(func: OpOverload, tensor: ShardedTensor, dim: int | None = None) -> Any:
    if dim is None:
        return _partials(tensor, func).sum(0)
    return _along(func, tensor, _dims(func, tensor, dim), False, lambda part: func(part, dim))


@register(
    aten.max.default, aten.min.default, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
)  # fmt: skip
def _extreme(func: OpOverload, tensor: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest or smallest element, and whether any or all are true."""
    # Of any and all an empty list of dimensions means none, of amax and amin all.
    dims = _dims(func, tensor, dim, none_means_all=func.overloadpacket in (aten.amax, aten.amin))
    if len(dims) < tensor.dim():
        return _along(func, tensor, dims, keepdim, lambda part: func(part, dim, keepdim))
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
        return _along(func, tensor, dims, keepdim, lambda part: func(part, order, dim, keepdim, dtype=dtype))
    given = dtype or tensor.dtype
    reduce = partial(torch.linalg.vector_norm, ord=order, dtype=_summed_in(given))
    total = _combined_norm(_partials(tensor, reduce, has_neutral=False), order).to(given.to_real())
    return _shaped(total, tensor, keepdim)


@register(aten.norm.Scalar, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def _norm(
    func: OpOverload, tensor: ShardedTensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    """What ``Tensor.norm`` calls."""
    dims = _dims(func, tensor, dim)
    if len(dims) < tensor.dim():
        return _along(func, tensor, dims, keepdim, lambda part: func(part, p, dim, keepdim, **options))
    return _vector_norm(func, tensor, 2 if p is None else p, dim, keepdim, **options)


# ---- of each tensor of a list, which clipping of gradients uses: one call for each owner ----------------------------


@register(_torch.foreach_norm)
def _norms(func: OpOverload, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    def reduce(parts: list[Tensor]) -> list[Tensor]:
        return func(parts, order, dtype=_summed_in(dtype or parts[0].dtype))

    def finish(partials: Tensor, given: torch.dtype) -> Tensor:
        return _combined_norm(partials, order).to((dtype or given).to_real())

    # A norm of nothing is 0; the smallest of no absolute values is above all others.
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
    """The result for each tensor of the list. What an owner sends travels as one tensor.

    Args:
        of_plain: the results of plain tensors.
        reduce: the results of one owner's parts.
        finish: the results of tensors of a dtype, from a tensor (owners, tensors) of those of the parts.
        neutral: what stands for an empty part of this dtype.
    """
    results: list[Any] = [None] * len(tensors)
    for group in groups_of([tensors]):
        for alike in _alike(group) if group.templates else [group]:
            if alike.templates:
                parts = zip(*(_parts(tensor, neutral) for tensor in alike.templates), strict=True)
                partials = stack_on_first([torch.stack(reduce([*of_owner])) for of_owner in parts])
                over = alike.templates[0].over
                if over is not None and not isinstance(alike.templates[0]._placement, Replicate):
                    partials = all_gather_owners(partials, over)
                found = [*finish(partials, alike.templates[0].dtype).unbind()]
            else:
                found = of_plain([tensors[position] for position in alike.positions])
            for position, result in zip(alike.positions, found, strict=True):
                results[position] = result
    return results


def _alike(group: Group) -> list[Group]:
    """The tensors of each dtype that are read on as many owners: of replicated ones only the first copy is."""
    found: dict[Any, Group] = {}
    for template, position in zip(group.templates, group.positions, strict=True):
        alike = found.setdefault((template.dtype, isinstance(template._placement, Replicate)), Group([], []))
        alike.templates.append(template)
        alike.positions.append(position)
    return [*found.values()]


def _parts(tensor: ShardedTensor, neutral: Callable[[torch.dtype], float]) -> list[Tensor]:
    if isinstance(tensor._placement, Replicate):
        return [tensor._shards[0]]
    if tensor.numel() == 0:  # torch's own result or error for nothing
        return [*tensor._shards]
    return [part if part.numel() else part.new_full((1,), neutral(part.dtype)) for part in tensor._shards]
