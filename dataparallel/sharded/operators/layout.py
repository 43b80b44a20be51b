"""`shards_for` divides an operator's argument into one for each owner; `make_sharded` makes a tensor of the results.

The *template* of a call is its first sharded argument with the most dimensions: all others are divided like it. Other
sharded arguments have to be so already. Plain tensors are sliced like its shards, or copied to each owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import NeedsWhole, refusal
from dataparallel.sharded.placements import Replicate, Rows, moved
from dataparallel.sharded.shards import copied_to, scalar_of, views_of_shards
from dataparallel.sharded.tensor import ShardedTensor


def find_template(values: Iterable[Any]) -> ShardedTensor:
    """The first of the sharded tensors with the most dimensions. At least one value has to be sharded."""
    return max((value for value in values if isinstance(value, ShardedTensor)), key=Tensor.dim)


def check_written(func: OpOverload, target: Any, template: ShardedTensor, where: str = "") -> None:
    """Raises `NeedsWhole` if a result divided like ``template`` cannot be written to the shards of ``target``."""
    if not isinstance(target, ShardedTensor):
        raise NeedsWhole(refusal(func, f" if it writes to a plain tensor{where}"))
    if target.shape != template.shape:
        why = f" if it writes a result of shape {tuple(template.shape)} to {tuple(target.shape)}"
        raise NeedsWhole(refusal(func, why))


def shard_devices(tensor: ShardedTensor) -> list[torch.device]:
    return [shard.device for shard in tensor._shards]


def _check_alike(func: OpOverload, tensor: ShardedTensor, template: ShardedTensor) -> None:
    if tensor._devices is not template._devices and tensor._devices != template._devices:
        one, other = ("[" + ", ".join(map(str, devices)) + "]" for devices in (template._devices, tensor._devices))
        why = f"different owners, {one} and {other}; distribute them over the same devices"
        raise NeedsWhole(ValueError(f"{func} got sharded tensors with {why}"))
    if tensor.shape != template.shape:
        raise NeedsWhole(refusal(func, f" of different shapes, {tuple(template.shape)} and {tuple(tensor.shape)}"))
    if tensor._placement is not template._placement and tensor._placement != template._placement:
        if isinstance(tensor._placement, Rows) or isinstance(template._placement, Rows):
            raise NeedsWhole(refusal(func, " that are views of different rows"))
        why = f"different placements, {template._placement} and {tensor._placement}; distribute them in the same way"
        raise NeedsWhole(ValueError(f"{func} got sharded tensors with {why}"))


def scalar_value(tensor: ShardedTensor) -> Tensor:
    """The one element of a sharded 0-dim tensor, as a plain tensor on the first owner. Collective over machines."""
    if isinstance(tensor._placement, Replicate):
        return tensor._shards[0]
    return scalar_of(tensor._shards, tensor.over)


def shards_for(func: OpOverload, value: Any, template: ShardedTensor) -> Sequence[Any]:
    """For each owner its argument: the elements that correspond to the owner's shard of ``template``.

    Raises `NeedsWhole` for other owners or another placement, and for what does not broadcast to the template's shape.
    """
    if isinstance(value, ShardedTensor):
        if value is template:
            return template._shards
        if value.dim() == 0 and template.dim() > 0:
            return copies_for_owners(scalar_value(value), template)
        _check_alike(func, value, template)
        return value._shards
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
    shape = template.shape
    if tensor.dim() > len(shape) or any(
        a not in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape), strict=False)
    ):
        raise NeedsWhole(refusal(func, f" of shape {tuple(shape)} with a plain tensor of shape {tuple(tensor.shape)}"))
    if isinstance(template._placement, Replicate):
        return copies_for_owners(tensor, template)
    dim = template._placement.dim - (len(shape) - tensor.dim())
    # A tensor that broadcasts along the divided dimension is not sliced.
    if dim < 0 or tensor.shape[dim] != shape[template._placement.dim]:
        return copies_for_owners(tensor, template)
    devices = shard_devices(template)
    views = views_of_shards(tensor.detach(), moved(template._placement, dim), len(devices), template.over)
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
    if template.dim() == 0:
        results = _shards_of_scalar(func, results, shards)
    for result, shard in zip(results, shards, strict=True):
        if result.shape != shard.shape:
            raise NeedsWhole(refusal(func, f": a part of shape {tuple(shard.shape)} became {tuple(result.shape)}"))
    return ShardedTensor(results, template._placement, template.shape, template._devices)


def _shards_of_scalar(func: OpOverload, results: Sequence[Tensor], shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """The shards of a 0-dim result. ``shards``: those of the template."""
    first = results[0]
    if shards[0].dim():  # another machine has the element, and the operator ran on a stand-in here
        first = first.new_empty(shards[0].shape)
    if len(results) < len(shards):  # the operator ran on the first shard only
        return [first, *[first.new_empty(shard.shape, device=shard.device) for shard in shards[1:]]]
    if any(result.dtype != first.dtype for result in results):
        raise NeedsWhole(refusal(func, " with 0-dim tensors of several dtypes in lists"))
    return [first, *results[1:]]
