"""Operators that copy: to other devices and dtypes, into other tensors, to the host; and second objects on one memory.

``tensor.to("cpu")`` takes every part to the CPU and keeps the owners, so that ``.to`` their type brings the parts back
(``sharded.owners``). Results are divided as their input is. `copy_` divides anew where target and source differ. Over
machines that, `copy_` to a plain tensor and ``item`` are collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.devices import CPU
from dataparallel.sharded.operators import refusal, register
from dataparallel.sharded.owners import destinations
from dataparallel.sharded.parts import join, move
from dataparallel.sharded.placements import Shard
from dataparallel.sharded.tensor import ShardedTensor, fill_parts

__all__: list[str] = []

aten = torch.ops.aten


@register(aten.detach.default, aten.alias.default)
def _second_object(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    return _like(tensor, tensor._shards)


@register(aten.view_as_real.default, aten.view_as_complex.default)
def _other_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Complex numbers as pairs in a last dimension, or the other way round, on the same memory."""
    tensor: ShardedTensor = args[0]
    last = tensor.dim() - (func is aten.view_as_complex.default)  # where the pairs are
    if isinstance(tensor._placement, Shard) and tensor._placement.dim >= last:
        raise refusal(func, f" of shape {tuple(tensor.shape)}, where it would cut pairs in two")
    shards = [func(shard) for shard in tensor._shards]
    shape = (*tensor.shape, 2) if func is aten.view_as_real.default else tensor.shape[:-1]
    return ShardedTensor(shards, tensor._placement, shape, tensor._devices)


@register(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    return _like(tensor, [func(shard, **kwargs) for shard in tensor._shards])


@register(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    places = _places(tensor, kwargs.pop("device", None))
    return _like(tensor, [func(shard, device=at, **kwargs) for shard, at in zip(tensor._shards, places, strict=True)])


@register(_torch.to_copy)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    non_blocking = kwargs.pop("non_blocking", False)
    places = _places(tensor, kwargs.pop("device", None))
    shards = []
    for shard, place in zip(tensor._shards, places, strict=True):
        copied = torch.empty_like(shard, device=place, **kwargs)
        move(copied, shard, non_blocking)
        shards.append(copied)
    return _like(tensor, shards)


@register(aten.copy_.default)
def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target, source = args[:2]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if not isinstance(target, ShardedTensor):
        # The whole, on the target's device; copy_ checks shapes.
        full = join(source._shards, source._placement, source.shape, target.device, source.over)
        target.copy_(full, non_blocking)
        return target
    if target.is_meta:
        source.expand(target.shape) if not isinstance(source, ShardedTensor) else _check_shape(target, source)
        return target
    if isinstance(source, ShardedTensor):
        _check_shape(target, source)
    else:
        source = source.expand(target.shape)
    fill_parts(target._shards, target._placement, source, target.over, non_blocking)
    return target


def _check_shape(target: ShardedTensor, source: ShardedTensor) -> None:
    if target.shape != source.shape:
        raise ValueError(f"cannot copy {source!r} into {target!r}: the shapes differ")


@register(_torch.pin_memory)
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    return _like(tensor, [shard.pin_memory() for shard in tensor._shards])


@register(aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Empty tensors have no memory that could be pinned.
    shards = [shard for shard in args[0]._shards if shard.numel()]
    return bool(shards) and all(shard.is_pinned() for shard in shards)


@register(_torch.local_scalar_dense)
def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: ShardedTensor = args[0]
    if tensor.numel() != 1:
        raise RuntimeError(f"only a tensor with one element has an item; got {tensor!r}")
    if tensor.over is not None:
        return tensor.full_tensor(CPU).item()
    return next(shard for shard in tensor._shards if shard.numel()).to(CPU).item()


def _places(tensor: ShardedTensor, device: torch.device | None) -> Sequence[torch.device]:
    if device is None:
        return [shard.device for shard in tensor._shards]
    return destinations(tensor._devices, torch.device(device))


def _like(tensor: ShardedTensor, shards: Sequence[Tensor]) -> ShardedTensor:
    return ShardedTensor(shards, tensor._placement, tensor.shape, tensor._devices)
