"""Reductions of a whole sharded tensor to a plain 0-dim tensor on the first owner, and reductions along dimensions.

Each owner reduces its part, the first owner reduces what they send. Of replicated tensors it reduces its own copy: the
others hold the same. A reduction along dimensions that are not divided has a sharded result, without any copy. One
along the divided dimension and not all others is refused.

Over machines a reduction of a whole tensor is collective. Every machine gets what all owners have found and reduces it
in their order, so results have the same bits everywhere, and those of as many owners on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.across import joined, of_all_owners
from dataparallel.sharded.operators import NeedsWhole, refusal, register
from dataparallel.sharded.operators.layout import single_value
from dataparallel.sharded.placements import Replicate, moved, part_shapes
from dataparallel.sharded.tensor import ShardedTensor

__all__ = ["combined_norm", "summed_in"]

aten = torch.ops.aten


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of results of parts: 16-bit floats are rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def combined_norm(partials: Tensor, order: float) -> Tensor:
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
        return joined([reduce(shards[0])])
    if tensor.dim() == 0:
        return joined([reduce(single_value(tensor))])
    if over is None or tensor.numel() == 0:
        parts = shards if has_neutral else [part for part in shards if part.numel()] or shards[:1]
        return joined([reduce(part) for part in parts])
    # Every owner sends a result, also one whose part is empty. That is left out afterwards.
    found = of_all_owners(joined([reduce(part if part.numel() else _ones(part)) for part in shards]), over)
    shapes = part_shapes(tensor.shape, tensor._placement, len(found))
    return found[[i for i, shape in enumerate(shapes) if shape.numel()]]


def _ones(part: Tensor) -> Tensor:
    return part.new_ones([1] * part.dim())


def _dims(func: OpOverload, tensor: ShardedTensor, dim: Any, none_means_all: bool = True) -> list[int]:
    """The dimensions that are reduced, not negative."""
    dims = tensor.dim()
    if dim is None or (none_means_all and not isinstance(dim, int) and len(dim) == 0):
        return [*range(dims)]
    given = [dim] if isinstance(dim, int) else [*dim]
    if any(not -max(dims, 1) <= d < max(dims, 1) for d in given):
        raise IndexError(f"{func}: a tensor of shape {tuple(tensor.shape)} has no dimensions {given}")
    return sorted({d % dims for d in given}) if dims else []


def _along(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int], keepdim: bool) -> Any:
    """The reduction of parts along dimensions that are not divided: a sharded result.

    Raises:
        NeedsWhole: the divided dimension is one of them.
    """
    tensor = args[0]
    placement: Any = tensor._placement
    if not isinstance(placement, Replicate):
        if placement.dim in dims or not tensor.dim():
            why = f" along dimensions {dims} of one that is divided along {placement.dim}"
            raise NeedsWhole(refusal(func, why))
        placement = placement if keepdim else moved(placement, placement.dim - sum(d < placement.dim for d in dims))
    shape = [1 if d in dims else size for d, size in enumerate(tensor.shape) if keepdim or d not in dims]
    parts = [func(shard, *args[1:], **kwargs) for shard in tensor._shards]
    if isinstance(parts[0], Tensor):
        return ShardedTensor(parts, placement, shape, tensor._devices)
    return tuple(ShardedTensor(of_one, placement, shape, tensor._devices) for of_one in zip(*parts, strict=True))


def _shaped(result: Tensor, tensor: ShardedTensor, keepdim: bool) -> Tensor:
    return result.reshape([1] * tensor.dim()) if keepdim else result


def _named(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, with defaults. The first one is the tensor."""
    defaults = _defaults(func)
    return {**defaults, **dict(zip(defaults, args[1:], strict=False)), **kwargs}


@cache
def _defaults(func: OpOverload) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in _torch.schema_of(func).arguments[1:]}


@register(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default, aten.mean.default, aten.mean.dim)
def add_up(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum or the mean."""
    tensor = args[0]
    named = _named(func, args, kwargs)
    keepdim = named.get("keepdim", False)
    dims = _dims(func, tensor, named.get("dim"))
    if len(dims) < tensor.dim():
        return _along(func, args, kwargs, dims, keepdim)
    is_mean = func.overloadpacket is aten.mean
    dtype = named["dtype"] or tensor.dtype
    if is_mean and not (dtype.is_floating_point or dtype.is_complex):
        func(tensor._shards[0], *args[1:], **kwargs)  # raises torch's own error
    add = aten.nansum.default if func.overloadpacket is aten.nansum else aten.sum.default
    is_exact = named["dtype"] is None and not (dtype.is_floating_point or dtype.is_complex)
    total = _partials(tensor, lambda part: add(part, dtype=None if is_exact else summed_in(dtype))).sum(0)
    if is_mean:
        total = total / tensor.numel()
    return _shaped(total if is_exact else total.to(dtype), tensor, keepdim)


@register(
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.logsumexp.default,
    aten.var.correction, aten.std.correction, aten.count_nonzero.dim_IntList,
)  # fmt: skip
def along(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reductions that cannot be put together from those of parts."""
    tensor = args[0]
    named = _named(func, args, kwargs)
    dims = _dims(func, tensor, named["dim"])
    return _along(func, args, kwargs, dims, named.get("keepdim", False))


@register(aten.prod.default)
def product(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The product of all elements."""
    return _partials(args[0], lambda part: func(part, **kwargs)).prod(0, **kwargs)


@register(aten.count_nonzero.default)
def count(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many elements are not 0."""
    tensor = args[0]
    dim = _named(func, args, kwargs)["dim"]
    if dim is None:
        return _partials(tensor, func).sum(0)
    return _along(func, args, kwargs, _dims(func, tensor, dim), False)


@register(
    aten.max.default, aten.min.default, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
)  # fmt: skip
def extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest element, and whether any or all are true."""
    tensor = args[0]
    named = _named(func, args, kwargs)
    keepdim = named.get("keepdim", False)
    # Of any and all an empty list of dimensions means none, of amax and amin all.
    dims = _dims(func, tensor, named.get("dim"), none_means_all=func.overloadpacket in (aten.amax, aten.amin))
    if len(dims) < tensor.dim():
        return _along(func, args, kwargs, dims, keepdim)
    simple = func.overloadpacket.default
    return _shaped(simple(_partials(tensor, simple, has_neutral=False)), tensor, keepdim)


@register(aten.linalg_vector_norm.default)
def vector_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The norm of all elements as one vector, or along dimensions."""
    tensor = args[0]
    named = _named(func, args, kwargs)
    dims = _dims(func, tensor, named["dim"])
    if len(dims) < tensor.dim():
        return _along(func, args, kwargs, dims, named["keepdim"])
    return _shaped(_norm(tensor, named["ord"], named["dtype"]), tensor, named["keepdim"])


@register(
    aten.norm.Scalar, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype
)  # fmt: skip
def norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``Tensor.norm`` calls."""
    tensor = args[0]
    named = _named(func, args, kwargs)
    keepdim = named.get("keepdim", False)
    dims = _dims(func, tensor, named.get("dim"))
    if len(dims) < tensor.dim():
        return _along(func, args, kwargs, dims, keepdim)
    order = 2 if named["p"] is None else named["p"]
    return _shaped(_norm(tensor, order, named.get("dtype")), tensor, keepdim)


def _norm(tensor: ShardedTensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norm of all elements."""
    given = dtype or tensor.dtype
    partials = _partials(
        tensor, lambda part: torch.linalg.vector_norm(part, order, dtype=summed_in(given)), has_neutral=False
    )
    return combined_norm(partials, order).to(given.to_real())
