"""Pointwise operators: one call for each owner, on its part. And comparisons that answer with a Python value.

Pointwise are all operators with ``torch.Tag.pointwise`` and a few that lack the tag. Those that write do so to the
parts of a sharded tensor, and return that tensor. Sharded arguments have the same owners, placement and shape. Plain
tensors that broadcast to that shape are sliced as the parts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import NeedsWhole, Operator, refusal, register, register_rule
from dataparallel.sharded.operators.layout import leading, parts_of, whole
from dataparallel.sharded.parts import from_all
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten

WITHOUT_TAG = frozenset(
    ["__ilshift__", "__irshift__", "elu_backward", "fill", "fill_", "hardshrink_backward", "hardsigmoid_backward",
     "hardswish", "hardswish_", "hardswish_backward", "hardtanh_backward", "leaky_relu", "leaky_relu_",
     "leaky_relu_backward", "masked_fill", "masked_fill_", "mish_backward", "rsub", "softplus_backward",
     "softshrink_backward", "zero_"]
)  # fmt: skip
"""Names of pointwise operators that lack the tag in some release of torch."""

OF_PYTHON = frozenset(
    ["__ilshift__", "__irshift__", "add_", "bitwise_and_", "bitwise_left_shift_", "bitwise_or_", "bitwise_right_shift_",
     "bitwise_xor_", "div_", "floor_divide_", "mul_", "pow_", "remainder_", "sub_"]
)  # fmt: skip
"""Names of the operators behind ``+=``, ``-=`` and so on."""

FOR_ALL = frozenset({bool, int, float, complex, type(None), torch.dtype})
"""Types of arguments that each owner gets as they are."""


@register_rule
def _rule(func: OpOverload) -> Operator | None:
    is_pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in WITHOUT_TAG
    return pointwise if is_pointwise and torch.Tag.nondeterministic_seeded not in func.tags else None


@cache
def _written(func: OpOverload) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Which arguments the operator writes to: positions, and names of those that are only given by name."""
    written = [
        (place, argument)
        for place, argument in enumerate(_torch.schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return (
        tuple(place for place, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written if argument.kwarg_only),
    )


_NOTHING: tuple[tuple[int, ...], tuple[str, ...]] = ((), ())
_FIRST: tuple[tuple[int, ...], tuple[str, ...]] = ((0,), ())
"""What `_written` says of most operators: that they write to nothing, or to their first argument."""


@register(aten.zero_.default)
def _zero_(func: OpOverload, tensor: ShardedTensor) -> Any:
    """Counts that the tensor was set to zero: gradients that wait to be added to it are void then."""
    pointwise(func, tensor)
    tensor._zeroed += 1
    return tensor


@register(aten.index_put_.default)
def _put_where(func: OpOverload, tensor: Tensor, indices: Any, value: Tensor, accumulate: bool = False) -> Any:
    """``tensor[mask] = number``. Other indices lead to elements of several owners."""
    mask = indices[0]
    is_mask = len(indices) == 1 and isinstance(mask, ShardedTensor) and mask.dtype is torch.bool
    if not is_mask or mask.shape != tensor.shape or value.numel() != 1 or accumulate:
        raise NeedsWhole(refusal(func))
    return pointwise(aten.masked_fill_.Tensor, tensor, mask, value.reshape(()))


@register(aten.equal.default)
def _equal(func: OpOverload, one: Tensor, other: Tensor) -> bool:
    """True if both have the same shape and elements. Collective."""
    if one.shape != other.shape:
        return False
    lead = leading([one, other])
    is_replicated = isinstance(lead._placement, Replicate)
    pairs = [*zip(parts_of(func, one, lead), parts_of(func, other, lead), strict=True)]
    if lead.dim() == 0 and not is_replicated:
        pairs = pairs[: lead._shards[0].dim() == 0]  # on one machine the first part has the element
    is_equal = all(func(a, b) for a, b in pairs)
    if lead.over is None or is_replicated:
        return is_equal
    return bool(from_all(torch.tensor(is_equal, device=lead.device), lead.over).all())


@register(aten.allclose.default)
def _all_close(func: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


@register(aten.is_same_size.default)
def _is_same_size(func: OpOverload, one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


@register(aten.lift_fresh.default)
def _lift_fresh(func: OpOverload, tensor: ShardedTensor) -> ShardedTensor:
    """The tensor itself: it is no constant of a trace."""
    return tensor


def pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The operator on each part. A 0-dim tensor has one part.

    Raises:
        NeedsWhole: as ``layout.parts_of``, and if it writes to a tensor that it cannot write to in parts. Where it is
            one of `OF_PYTHON` and writes to a plain tensor, the error is a ``RuntimeError``.
    """
    alike = _alike(func, args, kwargs)
    if alike is not None:
        return alike
    lead = leading([*args, *kwargs.values()])
    positions, names = _written(func)
    targets = [*(args[i] for i in positions), *(kwargs[name] for name in names)]
    for target in targets:
        if not isinstance(target, ShardedTensor):
            error = refusal(func, " if it writes to a plain tensor")
            # Of plain += sharded torch makes a TypeError into NotImplemented. Python would then compute
            # plain = plain + sharded: the name would be bound to another tensor, and nothing written.
            is_of_python = func.overloadpacket.__name__ in OF_PYTHON
            raise NeedsWhole(RuntimeError(*error.args) if is_of_python else error)
        if target.shape != lead.shape:
            why = f" if it writes a result of shape {tuple(lead.shape)} to {tuple(target.shape)}"
            raise NeedsWhole(refusal(func, why))
    columns: list[Sequence[Any]] = [parts_of(func, value, lead) for value in args]
    named = {name: parts_of(func, value, lead) for name, value in kwargs.items()}
    owners = len(lead._shards)
    calls = owners
    if lead.dim() == 0 and not isinstance(lead._placement, Replicate):
        calls = 1
        if lead._shards[0].dim():
            columns = [_standing_in(column) for column in columns]
            named = {name: _standing_in(column) for name, column in named.items()}
    results = [
        func(*[column[i] for column in columns], **{name: column[i] for name, column in named.items()})
        for i in range(calls)
    ]
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    return _wholes(func, results, lead)


def _standing_in(column: Sequence[Any]) -> Sequence[Any]:
    """A first part of a 0-dim tensor that has the element, also on machines that do not have it.

    An operator finds the dtype of its result by whether tensors are 0-dim. So on all machines it gets one that is.
    """
    first = column[0]
    return [first.new_ones(()) if isinstance(first, Tensor) and first.dim() else first]


def _alike(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `pointwise` returns, if the arguments are sharded tensors that are divided alike and numbers, else ``None``.

    Optimizers call hundreds of operators with such arguments in each step, and little Python runs for them here.
    Nothing is called before all arguments have been seen, and nothing is refused: the caller sees to other arguments.
    """
    lead: Any = None
    columns: list[Any] = []
    for value in args:
        if type(value) is ShardedTensor:
            if lead is None:
                lead, shape, devices, placement = value, value.shape, value._devices, value._placement
            elif value is not lead and (
                (value._devices is not devices and value._devices != devices)
                or (value._placement is not placement and value._placement != placement)
                or value.shape != shape
            ):
                return None
            columns.append(value._shards)
        elif type(value) in FOR_ALL:
            columns.append(repeat(value))
        else:
            return None
    if lead is None or not shape or not FOR_ALL.issuperset(map(type, kwargs.values())):
        return None
    written = _written(func)
    if written == _NOTHING:
        return _wholes(func, [func(*row, **kwargs) for row in zip(*columns, strict=False)], lead)
    if written != _FIRST:
        return None
    for row in zip(*columns, strict=False):
        func(*row, **kwargs)
    return args[0]


def _wholes(func: OpOverload, results: Sequence[Any], lead: ShardedTensor) -> Any:
    """What the operator returns, a sharded tensor or several, from what it has returned for each owner."""
    if isinstance(results[0], Tensor):
        return whole(func, results, lead)
    return tuple(whole(func, parts, lead) for parts in zip(*results, strict=True))
