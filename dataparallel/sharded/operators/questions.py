"""Operators that answer with a Python value, or with the tensor that they got. Comparisons are collective."""

from __future__ import annotations

from typing import Any

import torch

from dataparallel._torch import OpOverload
from dataparallel.sharded.across import from_all
from dataparallel.sharded.operators import register
from dataparallel.sharded.operators.layout import leading, parts_of
from dataparallel.sharded.placements import Replicate

aten = torch.ops.aten


@register(aten.equal.default)
def equal(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if both have the same shape and elements."""
    one, other = args
    if one.shape != other.shape:
        return False
    lead = leading(args)
    pairs = [*zip(parts_of(func, one, lead), parts_of(func, other, lead), strict=True)]
    if lead.dim() == 0 and not isinstance(lead._placement, Replicate):
        pairs = pairs[: lead._shards[0].dim() == 0]  # on one machine the first part has the element
    is_equal = all(func(a, b) for a, b in pairs)
    over = lead.over
    if over is None or isinstance(lead._placement, Replicate):
        return is_equal
    of_all = from_all(torch.tensor(is_equal, device=lead.device), over)
    return bool(of_all.all())


@register(aten.allclose.default)
def allclose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if all elements are close to those of the other tensor."""
    return bool(torch.isclose(*args, **kwargs).all())


@register(aten.is_same_size.default)
def is_same_size(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if both have the same shape."""
    return bool(args[0].shape == args[1].shape)


@register(aten.lift_fresh.default)
def lift_fresh(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself: it is no constant of a trace."""
    return args[0]
