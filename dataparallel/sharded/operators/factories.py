"""New tensors like a sharded one: divided in the same way if they have its shape, else plain on the first owner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataparallel._torch import OpOverload
from dataparallel.sharded.across import local_shapes
from dataparallel.sharded.operators import refusal, register
from dataparallel.sharded.tensor import ShardedTensor

__all__ = ["owners_device"]

aten = torch.ops.aten


def owners_device(func: OpOverload, tensor: ShardedTensor, kwargs: dict[str, Any]) -> torch.device | None:
    """Where ``device=`` wants all parts, or ``None``: each where its part of ``tensor`` is.

    Raises:
        TypeError: a device that is neither the tensor's own nor the CPU or meta.
    """
    device = kwargs.get("device")
    if device is None or device == tensor.device:
        return None
    if device.type in ("cpu", "meta"):
        return device
    if device.type == tensor.device.type and device.index is None:
        return None
    raise refusal(func, f" with device={device}, which is not that of the first part ({tensor.device})")


def _options(func: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments without those that say where, which the caller has read."""
    if kwargs.get("layout") not in (None, torch.strided):
        raise refusal(func, f" with layout={kwargs['layout']}")
    return {name: value for name, value in kwargs.items() if name not in ("device", "layout")}


@register(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A tensor of the same shape, filled with one value."""
    tensor = args[0]
    device, options = owners_device(func, tensor, kwargs), _options(func, kwargs)
    parts = [func(shard, *args[1:], device=device or shard.device, **options) for shard in tensor._shards]
    return ShardedTensor(parts, tensor._placement, tensor.shape, tensor._devices)


@register(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def new(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A tensor of any shape."""
    tensor, size = args[:2]
    if torch.Size(size) != tensor.shape:
        return func(tensor._shards[0], *args[1:], **kwargs)
    device, options = owners_device(func, tensor, kwargs), _options(func, kwargs)
    shapes = local_shapes(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)
    parts = [
        func(shard, shape, *args[2:], device=device or shard.device, **options)
        for shard, shape in zip(tensor._shards, shapes, strict=True)
    ]
    return ShardedTensor(parts, tensor._placement, tensor.shape, tensor._devices)


@register(aten.new_empty_strided.default)
def new_strided(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A tensor with the strides of a contiguous one, which autograd makes for a gradient that it copies."""
    tensor, size, stride = args[:3]
    if torch.Size(size) == tensor.shape and tuple(stride) != torch.empty(size, device="meta").stride():
        raise refusal(func, f" with the strides {tuple(stride)}")
    if torch.Size(size) != tensor.shape:
        return func(tensor._shards[0], *args[1:], **kwargs)
    return new(aten.new_empty.default, (tensor, size), kwargs)
