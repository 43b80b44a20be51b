"""Operators that copy: to other devices and dtypes, into other tensors, to the host.

``tensor.to("cpu")`` takes every part to the CPU and keeps the owners, so that ``.to`` their type brings the parts back.
`copy_` divides anew where target and source differ. Over machines that, `copy_` to a plain tensor and ``item`` are
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.devices import CPU
from dataparallel.sharded.operators import register
from dataparallel.sharded.parts import join, move
from dataparallel.sharded.placements import destinations
from dataparallel.sharded.tensor import ShardedTensor, fill_parts

aten = torch.ops.aten


def _like(tensor: ShardedTensor, shards: Sequence[Tensor]) -> ShardedTensor:
    return ShardedTensor(shards, tensor._placement, tensor.shape, tensor._devices)


def _empty_parts(tensor: ShardedTensor, device: torch.device | None, options: dict[str, Any]) -> list[Tensor]:
    places = [shard.device for shard in tensor._shards]
    if device is not None:
        places = [*destinations(tensor._devices, torch.device(device))]
    return [
        torch.empty_like(shard, device=place, **options) for shard, place in zip(tensor._shards, places, strict=True)
    ]


@register(aten.empty_like.default)
def _empty_like(
    func: OpOverload, tensor: ShardedTensor, *, device: torch.device | None = None, **options: Any
) -> ShardedTensor:
    return _like(tensor, _empty_parts(tensor, device, options))


@register(_torch.to_copy)
def _to_copy(
    func: OpOverload,
    tensor: ShardedTensor,
    *,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **options: Any,
) -> ShardedTensor:
    shards = _empty_parts(tensor, device, options)
    for copied, shard in zip(shards, tensor._shards, strict=True):
        move(copied, shard, non_blocking)
    return _like(tensor, shards)


@register(aten.clone.default)
def _clone(func: OpOverload, tensor: ShardedTensor, **options: Any) -> ShardedTensor:
    return _like(tensor, [func(shard, **options) for shard in tensor._shards])


@register(_torch.pin_memory)
def _pin_memory(func: OpOverload, tensor: ShardedTensor, device: torch.device | None = None) -> ShardedTensor:
    return _like(tensor, [shard.pin_memory() for shard in tensor._shards])


@register(aten.copy_.default)
def _copy_(func: OpOverload, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, ShardedTensor):
        # The whole, on the target's device; copy_ checks shapes.
        full = join(source._shards, source._placement, source.shape, target.device, source.over)
        target.copy_(full, non_blocking)
        return target
    if not isinstance(source, ShardedTensor):
        source = source.expand(target.shape)
    elif target.shape != source.shape:
        raise ValueError(f"cannot copy {source!r} into {target!r}: the shapes differ")
    if not target.is_meta:
        fill_parts(target._shards, target._placement, source, target.over, non_blocking)
    return target


@register(aten.is_pinned.default)
def _is_pinned(func: OpOverload, tensor: ShardedTensor, device: torch.device | None = None) -> bool:
    # Empty tensors have no memory that could be pinned.
    shards = [shard for shard in tensor._shards if shard.numel()]
    return bool(shards) and all(shard.is_pinned() for shard in shards)


@register(_torch.local_scalar_dense)
def _item(func: OpOverload, tensor: ShardedTensor) -> Any:
    if tensor.numel() != 1:
        raise RuntimeError(f"only a tensor with one element has an item; got {tensor!r}")
    if tensor.over is not None:
        return tensor.full_tensor(CPU).item()
    return next(shard for shard in tensor._shards if shard.numel()).to(CPU).item()
