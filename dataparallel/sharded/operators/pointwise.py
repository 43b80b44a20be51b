"""`pointwise` runs a pointwise operator once for each owner, on the owner's shards. Comparisons return a Python value.

An operator is pointwise if it has ``torch.Tag.pointwise``, or is one of a few that lack the tag. If it writes, it does
so to the shards of its target, and returns the target. Sharded arguments need the same owners, placement and shape. A
plain tensor that broadcasts to this shape is sliced like the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import (
    WRITES_NOTHING,
    NeedsWhole,
    Operator,
    refusal,
    register,
    register_rule,
    written_arguments,
    written_values,
)
from dataparallel.sharded.operators.layout import check_written, find_template, make_sharded, shards_for
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.shards import all_gather_stacked
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten

WITHOUT_TAG = frozenset(
    ["__ilshift__", "__irshift__", "_pin_memory", "clone", "elu_backward", "fill", "fill_", "hardshrink_backward",
     "hardsigmoid_backward", "hardswish", "hardswish_", "hardswish_backward", "hardtanh_backward", "leaky_relu",
     "leaky_relu_", "leaky_relu_backward", "lift_fresh", "masked_fill", "masked_fill_", "mish_backward", "rsub",
     "softplus_backward", "softshrink_backward", "zero_"]
)  # fmt: skip
"""Names of pointwise operators that lack the tag in some release of torch, and of copies of each element."""

PASSED_AS_IS = frozenset({bool, int, float, complex, type(None), torch.dtype})
"""Types of arguments that every owner's call gets unchanged."""


@register_rule
def _rule(func: OpOverload) -> Operator | None:
    is_pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in WITHOUT_TAG
    return pointwise if is_pointwise and torch.Tag.nondeterministic_seeded not in func.tags else None


_WRITES_FIRST: tuple[tuple[int, ...], tuple[str, ...]] = ((0,), ())
"""What `written_arguments` returns for most operators that write."""


@register(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)
def _overwrite(func: OpOverload, tensor: ShardedTensor, *value: Any) -> Any:
    """Counts it: a gradient that still waits to be added to the tensor may be void then."""
    pointwise(func, tensor, *value)
    tensor._overwrites += 1
    return tensor


@register(aten.index_put_.default)
def _put_where(func: OpOverload, tensor: Tensor, indices: Any, value: Tensor, accumulate: bool = False) -> Any:
    """``tensor[mask] = number``. Other indices select elements of several owners."""
    mask = indices[0]
    is_mask = len(indices) == 1 and isinstance(mask, ShardedTensor) and mask.dtype is torch.bool
    if not is_mask or mask.shape != tensor.shape or value.numel() != 1 or accumulate:
        raise NeedsWhole(refusal(func))
    return pointwise(aten.masked_fill_.Tensor, tensor, mask, value.reshape(()))


@register(aten.equal.default)
def _equal(func: OpOverload, one: Tensor, other: Tensor) -> bool:
    """True if both tensors have the same shape and elements. Collective over machines."""
    if one.shape != other.shape:
        return False
    template = find_template([one, other])
    is_replicated = isinstance(template._placement, Replicate)
    pairs = [*zip(shards_for(func, one, template), shards_for(func, other, template), strict=True)]
    if template.dim() == 0 and not is_replicated:
        pairs = pairs[:1] if _has_element(template) else []
    is_equal = all(func(a, b) for a, b in pairs)
    if template.over is None or is_replicated:
        return is_equal
    return bool(all_gather_stacked(torch.tensor(is_equal, device=template.device), template.over).all())


def _has_element(tensor: ShardedTensor) -> bool:
    """True if this machine has the element of a 0-dim tensor that is divided. On others all shards are empty."""
    return tensor._shards[0].dim() == 0


@register(aten.allclose.default)
def _all_close(func: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


@register(aten.is_same_size.default)
def _is_same_size(func: OpOverload, one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator once for each owner, and once in all for a 0-dim tensor that is not replicated.
    If it writes to a plain tensor or to one of another shape, this raises `NeedsWhole`.
    """
    result = _run_fast(func, args, kwargs)
    if result is not None:
        return result
    template = find_template([*args, *kwargs.values()])
    targets = [*written_values(func, args, kwargs)]
    for target in targets:
        check_written(func, target, template)
    columns: list[Sequence[Any]] = [shards_for(func, value, template) for value in args]
    named = {name: shards_for(func, value, template) for name, value in kwargs.items()}
    call_count = len(template._shards)
    if template.dim() == 0 and not isinstance(template._placement, Replicate):
        call_count = 1  # only the first shard can have the element
        if not _has_element(template):
            columns = [_as_scalar(column) for column in columns]
            named = {name: _as_scalar(column) for name, column in named.items()}
    results = [
        func(*[column[i] for column in columns], **{name: column[i] for name, column in named.items()})
        for i in range(call_count)
    ]
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    return _make_results(func, results, template)


def _as_scalar(column: Sequence[Any]) -> Sequence[Any]:
    """Puts a 0-dim stand-in in the place of the empty 1-dim shard that this machine has of a 0-dim tensor.

    The dtype of a result depends on whether arguments are 0-dim, and all machines have to get the same dtype.
    """
    first = column[0]
    return [first.new_ones(()) if isinstance(first, Tensor) and first.dim() else first]


def _run_fast(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fast path of `pointwise`, for numbers and sharded tensors with equal owners, placement and shape.

    Optimizers call hundreds of operators with such arguments in each step, so this runs little Python. For any other
    arguments it returns ``None`` before it has called the operator, and `pointwise` handles or refuses them.
    """
    template: Any = None
    columns: list[Any] = []
    for value in args:
        if type(value) is ShardedTensor:
            if template is None:
                template, shape, devices, placement = value, value.shape, value._devices, value._placement
            elif value is not template and (
                (value._devices is not devices and value._devices != devices)
                or (value._placement is not placement and value._placement != placement)
                or value.shape != shape
            ):
                return None
            columns.append(value._shards)
        elif type(value) in PASSED_AS_IS:
            columns.append(repeat(value))
        else:
            return None
    if template is None or not shape or not PASSED_AS_IS.issuperset(map(type, kwargs.values())):
        return None
    written = written_arguments(func)
    if written == WRITES_NOTHING:
        return _make_results(func, [func(*row, **kwargs) for row in zip(*columns, strict=False)], template)
    if written != _WRITES_FIRST:
        return None
    for row in zip(*columns, strict=False):
        func(*row, **kwargs)
    return args[0]


def _make_results(func: OpOverload, results: Sequence[Any], template: ShardedTensor) -> Any:
    if isinstance(results[0], Tensor):
        return make_sharded(func, results, template)
    return tuple(make_sharded(func, shards, template) for shards in zip(*results, strict=True))
