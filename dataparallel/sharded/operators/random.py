"""Random operators: the draw is that of the whole tensor on one device.

The first owner draws the whole tensor with its generator (or the one that is passed), then each owner gets its part. So
a seed gives the same values with any number of owners, and with a plain tensor on the first one. If the whole does
not fit on the first owner, the draw raises torch's out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel._torch import OpOverload
from dataparallel.sharded.operators import refusal, register
from dataparallel.sharded.operators.factories import owners_device
from dataparallel.sharded.operators.layout import sharded_in
from dataparallel.sharded.placements import Replicate, part_shapes
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
    drawn = func(torch.empty(tensor.shape, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
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
    drawn = func(torch.empty(tensor.shape, dtype=first.dtype, device="meta"), *args[1:], **options)
    parts = [
        drawn.new_empty(shape, device=device or shard.device)
        for shape, shard in zip(
            part_shapes(tensor.shape, tensor._placement, len(tensor._shards)), tensor._shards, strict=True
        )
    ]
    _write(parts, tensor, drawn)
    return ShardedTensor(parts, tensor._placement, tensor.shape, tensor._devices)


def _write(parts: Sequence[Tensor], tensor: ShardedTensor, drawn: Tensor) -> None:
    """Copies the draw into the parts of ``tensor``, or of one that is divided as it is."""
    if drawn.is_meta or parts[0].is_meta:
        return
    if isinstance(tensor._placement, Replicate):
        comm.broadcast(drawn, out=parts)
    elif tensor.dim() == 0:
        parts[0].copy_(drawn)
    else:
        comm.scatter(drawn, dim=tensor._placement.dim, out=parts)
