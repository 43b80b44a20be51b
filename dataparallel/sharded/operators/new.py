"""Operators that copy, fill or draw: into new tensors like a sharded one, into other tensors, or to the host.

``tensor.to("cpu")`` moves every shard to the CPU and keeps the owners, so that a later ``.to`` brings the shards back.
A new tensor of another shape is plain, on the first owner. Over machines draws, ``item``, and ``copy_`` to a tensor
that is plain or divided in another way are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.devices import CPU
from dataparallel.sharded.operators import refusal, register, sharded_in
from dataparallel.sharded.operators.layout import shard_devices
from dataparallel.sharded.placements import destinations
from dataparallel.sharded.shards import all_gather_stacked, copy_into, gather_full, local_shard_shapes
from dataparallel.sharded.tensor import ShardedTensor, fill_shards

aten = torch.ops.aten


def _like(tensor: ShardedTensor, shards: Sequence[Tensor]) -> ShardedTensor:
    return ShardedTensor(shards, tensor._placement, tensor.shape, tensor._devices)


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
        # The full tensor, on the target's device; copy_ checks shapes.
        full = gather_full(source._shards, source._placement, source.shape, target.device, source.over)
        target.copy_(full, non_blocking)
        return target
    if not isinstance(source, ShardedTensor):
        source = source.expand(target.shape)
    elif target.shape != source.shape:
        raise ValueError(f"cannot copy {source!r} into {target!r}: the shapes differ")
    if not target.is_meta:
        fill_shards(target._shards, target._placement, source, target.over, non_blocking)
    target._overwrites += 1
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


# ---- filled ----------------------------------------------------------------------------------------------------------


def _shapes(tensor: ShardedTensor) -> list[torch.Size]:
    return local_shard_shapes(tensor.shape, tensor._placement, len(tensor._shards), tensor.over)


def _places_of_new_shards(func: OpOverload, tensor: ShardedTensor, kwargs: dict[str, Any]) -> list[torch.device]:
    """The devices of the new shards. Pops ``device`` and ``layout`` from ``kwargs``."""
    device, layout = kwargs.pop("device", None), kwargs.pop("layout", None)
    if layout not in (None, torch.strided):
        raise refusal(func, f" with layout={layout}")
    return shard_devices(tensor) if device is None else [*destinations(tensor._devices, torch.device(device))]


@register(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _filled_like(func: OpOverload, tensor: ShardedTensor, *value: Any, **options: Any) -> ShardedTensor:
    places = _places_of_new_shards(func, tensor, options)
    pairs = zip(tensor._shards, places, strict=True)
    return _like(tensor, [func(shard, *value, device=place, **options) for shard, place in pairs])


@register(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def _new(func: OpOverload, tensor: ShardedTensor, size: Sequence[int], *value: Any, **options: Any) -> Tensor:
    if torch.Size(size) != tensor.shape:
        return func(tensor._shards[0], size, *value, **options)
    places = _places_of_new_shards(func, tensor, options)
    rows = zip(tensor._shards, _shapes(tensor), places, strict=True)
    return _like(tensor, [func(shard, shape, *value, device=place, **options) for shard, shape, place in rows])


@register(aten.new_empty_strided.default)
def _new_strided(
    func: OpOverload, tensor: ShardedTensor, size: Sequence[int], stride: Sequence[int], **options: Any
) -> Tensor:
    """Only the strides of a contiguous tensor work. Autograd calls this for a gradient that it copies."""
    if torch.Size(size) != tensor.shape:
        return func(tensor._shards[0], size, stride, **options)
    if tuple(stride) != torch.empty(size, device="meta").stride():
        raise refusal(func, f" with the strides {tuple(stride)}")
    return _new(aten.new_empty.default, tensor, size, **options)


# ---- draws -----------------------------------------------------------------------------------------------------------

# The first owner draws the full tensor, with its generator or the one that is passed, and each owner gets its shard. So
# a seed gives the same values with any number of owners. Over machines each machine draws the full tensor from the
# state of machine 0's generator. If the generator of a machine was in another state, that state advances as by a draw.


@register(
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.bernoulli_.Tensor,
    aten.exponential_.default, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
    aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
)  # fmt: skip
def _draw_in_place(func: OpOverload, tensor: Tensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    if not isinstance(tensor, ShardedTensor) or [*sharded_in(args)]:
        raise refusal(func, " as parameters of a distribution")
    first = tensor._shards[0]

    def draw() -> Tensor:
        return func(first.new_empty_strided(tensor.shape, tensor.stride()), *args, **kwargs)

    drawn = _drawn(tensor, draw, first.device, kwargs.get("generator"))
    fill_shards(tensor._shards, tensor._placement, drawn, tensor.over)
    return tensor


@register(
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    *[
        getattr(packet, name)
        for packet in (aten.rand_like, aten.randn_like, aten.randint_like)
        for name in ("generator", "low_generator_dtype")
        if name in packet.overloads()
    ],
)  # fmt: skip
def _drawn_like(func: OpOverload, tensor: ShardedTensor, *args: Any, **options: Any) -> ShardedTensor:
    places = _places_of_new_shards(func, tensor, options)
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    drawn = _drawn(tensor, lambda: func(like, *args, device=places[0], **options), places[0], options.get("generator"))
    shards = [drawn.new_empty(shape, device=place) for shape, place in zip(_shapes(tensor), places, strict=True)]
    fill_shards(shards, tensor._placement, drawn, tensor.over)
    return _like(tensor, shards)


def _drawn(
    tensor: ShardedTensor, draw: Callable[[], Tensor], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Calls ``draw``; over machines, with the state of machine 0's generator."""
    over = tensor.over
    if over is None or device.type == "meta":
        return draw()
    own_state = _state(generator, device)
    state = all_gather_stacked(own_state.to(tensor._shards[0].device), over)[0].to(CPU)
    drawn = draw()
    if not torch.equal(own_state, state):
        after = _state(generator, device)
        _set_state(generator, device, state)
        try:
            drawn = draw()
        finally:
            _set_state(generator, device, after)
    return drawn


def _state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The state of the generator, or of the device's default generator, on the CPU."""
    if generator is not None:
        return generator.get_state()
    if device.type == CPU.type:
        return torch.get_rng_state()
    found: Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def _set_state(generator: torch.Generator | None, device: torch.device, state: Tensor) -> None:
    if generator is not None:
        generator.set_state(state)
    elif device.type == CPU.type:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
