"""Nodes of autograd's graph with a time and a stream of their own: when sums run, and where what takes them does.

The engine runs a node on the stream that was current when the node was made, and takes ready nodes by their sequence
numbers. ``functions`` uses both for gradients that travel beside backward; which memory lives how long then is the
business of ``side_streams``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dataparallel.side_streams import BesideBackward

__all__ = ["HandOver", "sum_as_soon_as_ready"]


def sum_as_soon_as_ready(node: Any) -> None:
    """Has the engine run the node as soon as its gradients are there, before other nodes that are ready too.

    Of these the engine takes the one with the highest number, and numbers fall from the last layer to the first; only
    ``AccumulateGrad`` has a higher one than this. Without such numbers only the order changes: sums come last.
    """
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(2**62)


class HandOver(Function):
    """``HandOver.apply(*tensors)``: views of them, whose node belongs to the stream that is current now.

    The engine has that stream wait for what made a gradient, runs the node there, and orders what follows after it. A
    parameter's ``AccumulateGrad`` belongs to that stream too, where it is new.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The views."""
        ctx.set_materialize_grads(False)
        sum_as_soon_as_ready(ctx)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, taken out of their envelopes."""
        return tuple([getattr(grad, "enveloped", grad) for grad in grads])

    @staticmethod
    def enveloped(totals: Sequence[Tensor], beside: BesideBackward) -> list[Tensor]:
        """The tensors, whose memory ``beside`` holds, as Python attributes of others that have next to no memory.

        To gradients that go from one stream to another the engine applies ``record_stream``, which would keep their
        memory from being used again until the host looks.
        """
        if any(total.layout is not torch.strided for total in totals):
            return [*totals]
        beside.hold(totals)
        blank = torch.empty((), dtype=totals[0].dtype, device=totals[0].device)
        envelopes = []
        for total in totals:
            envelope = blank.to(total.dtype).expand(total.shape)
            envelope.enveloped = total  # type: ignore[attr-defined]
            envelopes.append(envelope)
        return envelopes
