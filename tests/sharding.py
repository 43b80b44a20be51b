"""Sharded tensors made and joined by hand, for tests of the operators between the two, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from dataparallel.sharded.placements import Owners, check_placement, over_of, shard_shapes
from dataparallel.sharded.view import ShardedView
from fake_machines import FakeOver

FIRST = Shard(0)


def sharded(
    tensor: Tensor, devices: Sequence[Any], placement: Any = FIRST, requires_grad: bool | None = None
) -> ShardedTensor:
    """A copy of the tensor, divided among the devices, which may be `Owners` over machines."""
    over, owners = over_of(devices), None if over_of(devices) is None else Owners(devices, over_of(devices))
    count = len(devices) * (1 if over is None else over.size)
    grad = tensor.requires_grad if requires_grad is None else requires_grad
    tensor = tensor.detach()
    placement = check_placement(placement, tensor.shape)
    shapes = shard_shapes(tensor.shape, placement, count)
    if isinstance(placement, Replicate):
        parts = [tensor] * count
    elif tensor.dim() == 0:
        parts = [tensor, *[tensor.new_empty(0)] * (count - 1)]
    else:
        parts = [*tensor.split([shape[placement.dim] for shape in shapes], placement.dim)]
    parts = parts if over is None else parts[over.rank :: over.size]
    shards = [part.contiguous().to(device, copy=True) for part, device in zip(parts, devices, strict=True)]
    return ShardedTensor(shards, placement, tensor.shape, owners, grad)


def full(value: Tensor, has_values: bool = True) -> Tensor:
    """The whole tensor on the CPU, without a graph. Each part has the shape that it should have."""
    if not isinstance(value, ShardedTensor):
        return value.detach().cpu()
    if isinstance(value, ShardedView):
        return value.full_tensor("cpu")
    placement = value.placement
    parts = [shard.detach().cpu() for shard in value.shards]
    if value.over is not None:
        of_all = cast("FakeOver", value.over).objects([part.clone() for part in parts])
        parts = [of_machine[i] for i in range(len(parts)) for of_machine in of_all]
    assert [part.shape for part in parts] == shard_shapes(value.shape, placement, len(parts))
    assert {part.dtype for part in parts} == {value.dtype}
    if isinstance(placement, Replicate):
        for part in parts[1:] if has_values else []:
            torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
        return parts[0]
    return parts[0] if value.dim() == 0 else torch.cat(parts, placement.dim)


def same(tensor: Tensor, expected: Tensor) -> bool:
    """True if it is a sharded tensor whose full tensor has this dtype and these values."""
    assert type(tensor) is ShardedTensor
    full = tensor.full_tensor("cpu")
    return full.dtype == expected.dtype and torch.equal(full, expected)


def owners(slots: Sequence[Any]) -> tuple[torch.device, ...]:
    return tuple(torch.device(slot) for slot in slots)


def places(tensor: ShardedTensor) -> tuple[torch.device, ...]:
    """Where the parts are; the tensor's own device is that of the first."""
    assert tensor.device == tensor.shards[0].device
    return tuple(shard.device for shard in tensor.shards)
