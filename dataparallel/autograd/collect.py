"""`Collect`: the outputs of replicas on one device, without joining them.

``autograd.functions.Gather`` concatenates one tensor of each replica. This is for tensors that stay apart, of which
each replica has its own number: ``batches`` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dataparallel.autograd.functions import Broadcast, note_whether_to_recompute, recompute_here
from dataparallel.comm import settings
from dataparallel.devices import DeviceLike
from dataparallel.streams.current import streams_set

__all__ = ["Collect"]


class Collect(Broadcast):
    """``Collect.apply(devices, *tensors)``: the tensors on the only one of ``devices``, wherever they were.

    Backward sends each gradient to the device of its tensor, from this one node.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[DeviceLike], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = Broadcast.forward(ctx, devices, *tensors)
        note_whether_to_recompute(ctx, ctx.sources, outputs[0])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # What is computed again reads no gradient, and what uses it is ordered by the end of `Broadcast.backward`.
        with streams_set(ctx.streams), settings.held(ctx.settings):
            recompute_here(ctx, ctx.sources)
        return Broadcast.backward(ctx, *grads)
