"""Random operators: the draw is that of the whole tensor on one device.

The first owner draws the whole tensor with its generator (or the one that is passed), then each owner gets its part. So
a seed gives the same values with any number of owners, and with a plain tensor on the first one. If the whole does
not fit on the first owner, the draw raises torch's out-of-memory error.

Over machines each draws the whole, from the state that machine 0's generator has, and keeps its parts. The state is
sent, so draws are collective. A machine whose generator was in another state has it advance as a draw of its own does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel._torch import OpOverload
from dataparallel.devices import CPU
from dataparallel.sharded.across import from_first, local_shapes
from dataparallel.sharded.operators import refusal, register
from dataparallel.sharded.operators.factories import owners_device
from dataparallel.sharded.operators.layout import sharded_in
from dataparallel.sharded.parts import split_into
from dataparallel.sharded.placements import Replicate
from dataparallel.sharded.tensor import ShardedTensor

aten = torch.ops.aten


@register(
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.bernoulli_.Tensor,
    aten.exponential_.default, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
    aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
)  # fmt: skip
def draw_in_place(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Overwrites all parts with a draw."""
    tensor = args[0]
    if not isinstance(tensor, ShardedTensor) or any(sharded_in(args[1:])):
        raise refusal(func, " as parameters of a distribution")
    first = tensor._shards[0]
    drawn = _drawn(
        tensor,
        lambda: func(first.new_empty_strided(tensor.shape, tensor.stride()), *args[1:], **kwargs),
        first.device,
        kwargs,
    )
    _write(tensor._shards, tensor, drawn)
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
def draw_like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A new tensor of the same shape, drawn."""
    tensor = args[0]
    if kwargs.get("layout") not in (None, torch.strided):
        raise refusal(func, f" with layout={kwargs['layout']}")
    device = owners_device(func, tensor, kwargs)
    first = tensor._shards[0]
    options = {**kwargs, "device": device or first.device}
    like = torch.empty(tensor.shape, dtype=first.dtype, device="meta")
    drawn = _drawn(tensor, lambda: func(like, *args[1:], **options), options["device"], kwargs)
    parts = [
        drawn.new_empty(shape, device=device or shard.device)
        for shape, shard in zip(
            local_shapes(tensor.shape, tensor._placement, len(tensor._shards), tensor.over),
            tensor._shards,
            strict=True,
        )
    ]
    _write(parts, tensor, drawn)
    return ShardedTensor(parts, tensor._placement, tensor.shape, tensor._devices)


def _drawn(tensor: ShardedTensor, draw: Callable[[], Tensor], device: torch.device, kwargs: dict[str, Any]) -> Tensor:
    """The draw, over machines with the state of machine 0's generator."""
    over = tensor.over
    if over is None or device.type == "meta":
        return draw()
    generator = kwargs.get("generator")
    mine = _state(generator, device)
    state = from_first(mine.to(tensor._shards[0].device), over).to(CPU)
    drawn = draw()
    if not torch.equal(mine, state):
        after = _state(generator, device)
        _set_state(generator, device, state)
        try:
            drawn = draw()
        finally:
            _set_state(generator, device, after)
    return drawn


def _state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Of the generator, or of the device's own. On the CPU."""
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


def _write(parts: Sequence[Tensor], tensor: ShardedTensor, drawn: Tensor) -> None:
    """Copies the draw into the parts of ``tensor``, or of one that is divided as it is."""
    if drawn.is_meta or parts[0].is_meta:
        return
    if isinstance(tensor._placement, Replicate):
        comm.broadcast(drawn, out=parts)
    elif tensor.over is not None:
        split_into(parts, tensor._placement, drawn, over=tensor.over)
    elif tensor.dim() == 0:
        parts[0].copy_(drawn)
    else:
        comm.scatter(drawn, dim=tensor._placement.dim, out=parts)
