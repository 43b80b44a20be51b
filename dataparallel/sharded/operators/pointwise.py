"""`pointwise` runs a pointwise operator once for each owner, on the owner's shards. Comparisons return a Python value.

The *template* of a call is its first sharded argument with the most dimensions: all others are divided like it. Other
sharded arguments have to be so already. Plain tensors are sliced like its shards, or copied to each owner.

An operator is pointwise if it has ``torch.Tag.pointwise``, or is one of a few that lack the tag. If it writes, it does
so to the shards of its target, and returns the target. Sharded arguments need the same owners, placement and shape. A
plain tensor that broadcasts to this shape is sliced like the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import RULES, NeedsWhole, Operator, refusal, register, written_values
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.shards import copied_to, scalar_of, views_of_shards
from dataparallel.sharded.tensor import ShardedTensor, is_divided_alike

aten = torch.ops.aten

WITHOUT_TAG = frozenset(
    ["__ilshift__", "__irshift__", "_pin_memory", "clone", "elu_backward", "fill", "fill_", "hardshrink_backward",
     "hardsigmoid_backward", "hardswish", "hardswish_", "hardswish_backward", "hardtanh_backward", "leaky_relu",
     "leaky_relu_", "leaky_relu_backward", "lift_fresh", "masked_fill", "masked_fill_", "mish_backward", "rsub",
     "softplus_backward", "softshrink_backward", "zero_"]
)  # fmt: skip
"""Names of pointwise operators that lack the tag in some release of torch, and of copies of each element."""


def _rule(func: OpOverload) -> Operator | None:
    is_pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in WITHOUT_TAG
    return pointwise if is_pointwise and torch.Tag.nondeterministic_seeded not in func.tags else None


RULES.append(_rule)


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
    if one.dtype != other.dtype:
        raise refusal(func, f" of different dtypes, {one.dtype} and {other.dtype}")
    return one.shape == other.shape and bool((one == other).all())


@register(aten.allclose.default)
def _all_close(func: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs the operator once for each owner. What it writes to has to be divided like the template."""
    template = find_template([*args, *kwargs.values()])
    targets = [*written_values(func, args, kwargs)]
    for target in targets:
        if target is not template:
            check_written(func, target, template)
    columns = [shards_for(func, value, template) for value in args]
    of_names = zip(*(shards_for(func, value, template) for value in kwargs.values()), strict=True)
    named: Iterable[dict[str, Any]] = [dict(zip(kwargs, values, strict=True)) for values in of_names] or repeat({})
    results = [func(*row, **of_owner) for row, of_owner in zip(zip(*columns, strict=True), named, strict=False)]
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    if isinstance(results[0], Tensor):
        return make_sharded(func, results, template)
    return tuple(make_sharded(func, shards, template) for shards in zip(*results, strict=True))


# ---- arguments and results of owners


def find_template(values: Iterable[Any]) -> ShardedTensor:
    """The first of the sharded tensors with the most dimensions. At least one value has to be sharded."""
    return max((value for value in values if isinstance(value, ShardedTensor)), key=Tensor.dim)


def check_written(func: OpOverload, target: Any, template: ShardedTensor) -> None:
    """Raises `NeedsWhole` if a result divided like ``template`` cannot be written to the shards of ``target``."""
    if not isinstance(target, ShardedTensor):
        raise NeedsWhole(refusal(func, " if it writes to a plain tensor"))
    if target.shape != template.shape:
        why = f" if it writes a result of shape {tuple(template.shape)} to {tuple(target.shape)}"
        raise NeedsWhole(refusal(func, why))


def shard_devices(tensor: ShardedTensor) -> list[torch.device]:
    return [shard.device for shard in tensor._shards]


def _difference(func: OpOverload, tensor: ShardedTensor, template: ShardedTensor) -> Exception:
    if tensor._devices != template._devices:
        one, other = ("[" + ", ".join(map(str, devices)) + "]" for devices in (template._devices, tensor._devices))
        why = f"different owners, {one} and {other}; distribute them over the same devices"
    elif tensor.shape != template.shape:
        return refusal(func, f" of different shapes, {tuple(template.shape)} and {tuple(tensor.shape)}")
    else:
        why = f"different placements, {template._placement} and {tensor._placement}; distribute them in the same way"
    return ValueError(f"{func} got sharded tensors with {why}")


def scalar_value(tensor: ShardedTensor) -> Tensor:
    """The one element of a sharded 0-dim tensor, as a plain tensor on the first owner. Collective over machines."""
    if isinstance(tensor._placement, Replicate):
        return tensor._shards[0]
    return scalar_of(tensor._shards, tensor.over)


def elements(tensor: ShardedTensor) -> Sequence[Tensor]:
    """The shards, with a 0-dim stand-in for the first one if another machine has the element of a 0-dim tensor.

    The dtype of a result depends on whether arguments are 0-dim, and all machines have to get the same dtype.
    """
    shards = tensor._shards
    return shards if tensor.dim() or not shards[0].dim() else [shards[0].new_ones(()), *shards[1:]]


def shards_for(func: OpOverload, value: Any, template: ShardedTensor) -> Sequence[Any]:
    """For each owner its argument: the elements that correspond to the owner's shard of ``template``.

    Raises `NeedsWhole` for other owners or another placement, and for what does not broadcast to the template's shape.
    """
    if isinstance(value, ShardedTensor):
        if value is template or is_divided_alike(value, template):
            return elements(value)
        if value.dim() == 0 and template.dim() > 0:
            return copies_for_owners(scalar_value(value), template)
        raise NeedsWhole(_difference(func, value, template))
    if isinstance(value, Tensor):
        return _slices_of_plain(func, value, template)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        raise NeedsWhole(refusal(func, " in lists"))
    return [value] * len(template._shards)


def _slices_of_plain(func: OpOverload, tensor: Tensor, template: ShardedTensor) -> Sequence[Tensor]:
    if tensor.layout is not torch.strided:
        raise refusal(func, f" with a tensor of layout {tensor.layout}")
    if tensor.dim() == 0:
        return copies_for_owners(tensor, template)
    shape, devices = template.shape, shard_devices(template)
    try:
        expanded = tensor.detach().expand(shape)
    except RuntimeError:
        why = f" of shape {tuple(shape)} with a plain tensor of shape {tuple(tensor.shape)}"
        raise NeedsWhole(refusal(func, why)) from None
    views = views_of_shards(expanded, template._placement, len(devices), template.over)
    return [copied_to(device, view) for device, view in zip(devices, views, strict=True)]


def copies_for_owners(tensor: Tensor, template: ShardedTensor) -> Sequence[Tensor]:
    """The plain tensor on the device of each shard. Owners on one device may share a copy, so nobody writes to it."""
    devices = shard_devices(template)
    if all(device == tensor.device for device in devices):
        return [tensor] * len(devices)
    if tensor.is_meta or any(device.type == "meta" for device in devices):
        return [tensor.to(device) for device in devices]
    return comm.broadcast(tensor.detach(), devices)


def make_sharded(func: OpOverload, results: Sequence[Tensor], template: ShardedTensor) -> ShardedTensor:
    """Makes a sharded tensor of the owners' results, divided as ``template`` is. A 0-dim one needs the first only."""
    shards = template._shards
    if not template.dim() and not isinstance(template._placement, Replicate):
        # Another machine may have the element; the operator ran on a stand-in then.
        first = results[0] if shards[0].dim() == 0 else results[0].new_empty(shards[0].shape)
        results = [first, *[first.new_empty(shard.shape, device=shard.device) for shard in shards[1:]]]
    for result, shard in zip(results, shards, strict=True):
        if result.shape != shard.shape:
            raise NeedsWhole(refusal(func, f": a part of shape {tuple(shard.shape)} became {tuple(result.shape)}"))
    return ShardedTensor(results, template._placement, template.shape, template._devices)
