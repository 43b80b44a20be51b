"""Operators that copy, fill or draw: into new tensors like a sharded one, into other tensors, or to the host.

``tensor.to("cpu")`` moves every shard to the CPU and keeps the owners, so that a later ``.to`` brings the shards back.
A new tensor of another shape is plain, on the first owner. Over machines draws, ``item``, and ``copy_`` to a tensor
that is plain or divided in another way are collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.devices import CPU
from dataparallel.sharded.operators import OF_VIEWS, TABLE, refusal, register, sharded_in
from dataparallel.sharded.operators.pointwise import shard_devices
from dataparallel.sharded.placements import destinations
from dataparallel.sharded.shards import all_gather_stacked, copy_into
from dataparallel.sharded.tensor import ShardedTensor, fill_shards
from dataparallel.sharded.view import ShardedView

aten = torch.ops.aten


@register(_torch.to_copy)
def _to_copy(func: OpOverload, tensor: ShardedTensor, *, non_blocking: bool = False, **options: Any) -> ShardedTensor:
    made = _filled_like(aten.empty_like.default, tensor, **options)
    for copied, shard in zip(made._shards, tensor._shards, strict=True):
        copy_into(copied, shard, non_blocking)
    made._overwrites = tensor._overwrites  # `Module.to` swaps a gradient and its copy
    return made


@register(aten.copy_.default)
def _copy_(func: OpOverload, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, ShardedTensor):
        return target.copy_(source.full_tensor(target.device), non_blocking)  # which checks the shapes
    if not isinstance(source, ShardedTensor):
        source = source.expand(target.shape)
    elif target.shape != source.shape:
        raise ValueError(f"cannot copy {source!r} into {target!r}: the shapes differ")
    if not target.is_meta:
        fill_shards(target._shards, target._placement, source, target.over, non_blocking)
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
    return tensor.full_tensor(CPU).item()


# ---- filled ----------------------------------------------------------------------------------------------------------


@register(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _filled_like(
    func: OpOverload, tensor: ShardedTensor, *value: Any, device: Any = None, layout: Any = None, **options: Any
) -> ShardedTensor:
    if layout not in (None, torch.strided):
        raise refusal(func, f" with layout={layout}")
    places = shard_devices(tensor) if device is None else destinations(tensor._devices, torch.device(device))
    shards = [func(shard, *value, device=to, **options) for shard, to in zip(tensor._shards, places, strict=True)]
    return ShardedTensor(shards, tensor._placement, tensor.shape, tensor._devices)


_LIKE = {
    aten.new_zeros.default: aten.zeros_like.default,
    aten.new_ones.default: aten.ones_like.default,
    aten.new_full.default: aten.full_like.default,
    aten.new_empty.default: aten.empty_like.default,
    aten.new_empty_strided.default: aten.empty_like.default,
}


@register(*_LIKE)
def _new(func: OpOverload, tensor: ShardedTensor, size: Sequence[int], *values: Any, **options: Any) -> Tensor:
    if torch.Size(size) != tensor.shape:
        return func(tensor._shards[0], size, *values, **options)
    if func is aten.new_empty_strided.default:  # autograd calls it for a gradient that it copies
        if tuple(values[0]) != torch.empty(size, device="meta").stride():
            raise refusal(func, f" with the strides {tuple(values[0])}")
        values = ()
    return _filled_like(_LIKE[func], tensor, *values, **options)


# ---- draws -----------------------------------------------------------------------------------------------------------

# The first owner draws the full tensor, with its generator or the one that is passed, and each owner gets its shard. So
# a seed gives the same values with any number of owners. Over machines each machine draws the full tensor from the
# state of machine 0's generator. If the generator of a machine was in another state, that state advances as by a draw.


@register(
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.bernoulli_.Tensor,
    aten.exponential_.default, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
    aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
)  # fmt: skip
def _draw(func: OpOverload, tensor: Tensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
    """It draws into a view too."""
    if not isinstance(tensor, ShardedTensor) or [*sharded_in(args)]:
        raise refusal(func, " as parameters of a distribution")
    first, over = tensor._shards[0], tensor.over
    drawn = first.new_empty_strided(tensor.shape, tensor.stride())
    state = None if over is None or first.is_meta else _state(generator, first.device)
    func(drawn, *args, generator=generator)
    if over is not None and state is not None:
        state_0 = all_gather_stacked(state.to(first.device), over)[0].to(CPU)
        if not torch.equal(state, state_0):
            generator = torch.Generator(first.device)
            generator.set_state(state_0)
            func(drawn, *args, generator=generator)
    return tensor.copy_(drawn)


def _state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The state of the generator, or of the device's default generator, on the CPU."""
    if generator is not None:
        return generator.get_state()
    state: Tensor = (
        torch.get_rng_state() if device.type == CPU.type else torch.get_device_module(device).get_rng_state(device)
    )
    return state


_DRAWS: dict[Any, Any] = {
    aten.rand_like: Tensor.uniform_,
    aten.randn_like: Tensor.normal_,
    aten.randint_like: Tensor.random_,
}


@register(
    *[
        getattr(packet, name)
        for packet in _DRAWS
        for name in ("default", "generator", "low_dtype", "low_generator_dtype")
        if name in packet.overloads()
    ]
)
def _drawn_like(func: OpOverload, tensor: Tensor, *limits: int, generator: Any = None, **options: Any) -> Tensor:
    limits = (0, *limits) if func.overloadpacket is aten.randint_like and len(limits) == 1 else limits
    return _DRAWS[func.overloadpacket](torch.empty_like(tensor, **options), *limits, generator=generator)


def _on_clone(func: OpOverload, view: ShardedView, *args: Any, **kwargs: Any) -> Any:
    return func(view.detach().clone(), *args, **kwargs)


for _overload, _operator in TABLE.items():
    if _operator in (_to_copy, _is_pinned, _item, _filled_like, _new):
        OF_VIEWS[_overload] = _on_clone
    elif _operator in (_draw, _drawn_like):
        OF_VIEWS[_overload] = _operator
