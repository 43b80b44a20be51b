"""Arguments of an operator, taken apart into one argument for each owner, and results put together again.

An operator's layout is that of its leading argument: the first sharded tensor with the most dimensions. Other sharded
tensors lie in the same way. Plain tensors are sliced or copied to where the parts are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import NeedsWhole, refusal
from dataparallel.sharded.parts import the_value
from dataparallel.sharded.placements import Replicate, Rows, on_this_machine, parts_on_all, rows_of
from dataparallel.sharded.tensor import ShardedTensor


def sharded_in(values: Iterable[Any]) -> Iterator[ShardedTensor]:
    """The sharded tensors among the values and in lists there."""
    for value in values:
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from sharded_in(value)


def leading(values: Iterable[Any]) -> ShardedTensor:
    """The first sharded tensor of the most dimensions. There is one."""
    return max((value for value in values if isinstance(value, ShardedTensor)), key=Tensor.dim)


def _places(tensor: ShardedTensor) -> list[torch.device]:
    return [shard.device for shard in tensor._shards]


def _check_alike(func: OpOverload, tensor: ShardedTensor, lead: ShardedTensor) -> None:
    """Raises `NeedsWhole` unless both are divided in the same way."""
    if tensor._devices is not lead._devices and tensor._devices != lead._devices:
        one, other = ("[" + ", ".join(map(str, devices)) + "]" for devices in (lead._devices, tensor._devices))
        why = f"different owners, {one} and {other}; distribute them over the same devices"
        raise NeedsWhole(ValueError(f"{func} got sharded tensors with {why}"))
    if tensor.shape != lead.shape:
        raise NeedsWhole(refusal(func, f" of different shapes, {tuple(lead.shape)} and {tuple(tensor.shape)}"))
    if tensor._placement is not lead._placement and tensor._placement != lead._placement:
        if isinstance(tensor._placement, Rows) or isinstance(lead._placement, Rows):
            raise NeedsWhole(refusal(func, " that are views of different rows"))
        why = f"different placements, {lead._placement} and {tensor._placement}; distribute them in the same way"
        raise NeedsWhole(ValueError(f"{func} got sharded tensors with {why}"))


def single_value(tensor: ShardedTensor) -> Tensor:
    """The one element of a sharded 0-dim tensor, as a plain tensor on the first owner. Collective over machines."""
    if isinstance(tensor._placement, Replicate):
        return tensor._shards[0]
    return the_value(tensor._shards, tensor.over)


def parts_of(func: OpOverload, value: Any, lead: ShardedTensor) -> Sequence[Any]:
    """For each owner its argument: what corresponds to its part of ``lead``.

    Raises:
        NeedsWhole: a sharded tensor with other owners or another placement; a tensor that does not broadcast to the
            shape of ``lead``.
        TypeError: a tensor that is not dense.
    """
    if isinstance(value, ShardedTensor):
        if value is lead:
            return lead._shards
        if value.dim() == 0 and lead.dim() > 0:
            return on_each(single_value(value), lead)
        _check_alike(func, value, lead)
        return value._shards
    if isinstance(value, Tensor):
        return _plain_parts(func, value, lead)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        raise NeedsWhole(refusal(func, " in lists"))
    return [value] * len(lead._shards)


def _plain_parts(func: OpOverload, tensor: Tensor, lead: ShardedTensor) -> Sequence[Tensor]:
    if tensor.layout is not torch.strided:
        raise refusal(func, f" with a tensor of layout {tensor.layout}")
    if tensor.dim() == 0:
        return on_each(tensor, lead)
    shape = lead.shape
    if tensor.dim() > len(shape) or any(
        a not in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape), strict=False)
    ):
        raise NeedsWhole(refusal(func, f" of shape {tuple(shape)} with a plain tensor of shape {tuple(tensor.shape)}"))
    if isinstance(lead._placement, Replicate):
        return on_each(tensor, lead)
    dim = lead._placement.dim - (len(shape) - tensor.dim())
    # One row for all rows is copied as it is.
    if dim < 0 or tensor.shape[dim] != shape[lead._placement.dim]:
        return on_each(tensor, lead)
    devices = _places(lead)
    over, plain = lead.over, tensor.detach()
    rows = rows_of(lead._placement, tensor.shape[dim], parts_on_all(len(devices), over))
    is_at_once = over is None and not tensor.is_meta and devices[0].type != "meta"
    if is_at_once and any(device != tensor.device for device in devices):
        return comm.scatter(plain, devices, rows, dim)
    return [
        _on(device, part) for part, device in zip(on_this_machine(plain.split(rows, dim), over), devices, strict=True)
    ]


def _on(device: torch.device, part: Tensor) -> Tensor:
    if device == part.device or part.is_meta or device.type == "meta":
        return part.to(device)
    return comm.broadcast(part, [device])[0]


def on_each(tensor: Tensor, lead: ShardedTensor) -> Sequence[Tensor]:
    """The plain tensor on the device of each part. Owners on one device may share the copy, so it is only read."""
    devices = _places(lead)
    if all(device == tensor.device for device in devices):
        return [tensor] * len(devices)
    if tensor.is_meta or any(device.type == "meta" for device in devices):
        return [tensor.to(device) for device in devices]
    return comm.broadcast(tensor.detach(), devices)


def whole(func: OpOverload, results: Sequence[Tensor], lead: ShardedTensor) -> ShardedTensor:
    """The sharded tensor with these parts, divided as ``lead`` is. A 0-dim one's other parts are added, empty."""
    shards = lead._shards
    if lead.dim() == 0:
        results = _of_single(func, results, shards)
    for result, shard in zip(results, shards, strict=True):
        if result.shape != shard.shape:
            raise NeedsWhole(refusal(func, f": a part of shape {tuple(shard.shape)} became {tuple(result.shape)}"))
    return ShardedTensor(results, lead._placement, lead.shape, lead._devices)


def _of_single(func: OpOverload, results: Sequence[Tensor], shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts of a 0-dim result."""
    first = results[0]
    if shards[0].dim():  # the element is on another machine, and something stood in for it
        first = first.new_empty(shards[0].shape)
    if len(results) < len(shards):  # the operator ran on the first part only
        return [first, *[first.new_empty(part.shape, device=part.device) for part in shards[1:]]]
    if any(result.dtype != first.dtype for result in results):
        raise NeedsWhole(refusal(func, " with 0-dim tensors of several dtypes in lists"))
    return [first, *results[1:]]
