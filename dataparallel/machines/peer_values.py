"""`Exchange`: the node of the graph in which machines exchange values of a collective.

Its backward is an exchange the other way, so it can be differentiated as often as you like. Only ``peer_rounds`` calls
it. The collectives themselves are made of this node and of operators of torch (``peers.across_machines``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.packed import Part

if TYPE_CHECKING:
    from dataparallel.machines.peer_rounds import PeerRounds

__all__ = ["BACKWARD", "FORWARD", "Exchange", "has_gradients"]

FORWARD, BACKWARD = "a collective across machines", "the backward of a collective across machines"


class Exchange(Node):
    """``Exchange.apply(rounds, text, sends, receives, token, *flats, *owns)``: another token, what has come, and owns.

    Each of ``flats`` is a `Part` with the sizes of ``sends`` and ``receives``; all of them are one message, there and
    back. ``owns`` are what this machine has for itself. They pass through the node, so that a backward through any
    result comes here, on every machine. The token has no elements. It orders the backwards: a node runs after the one
    that took its token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rounds: PeerRounds,
        text: str,
        sends: Sequence[Sequence[int]],
        receives: Sequence[Sequence[int]],
        token: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The exchange; the host waits for what comes."""
        ctx.rounds, ctx.text, ctx.sends, ctx.receives = rounds, text, sends, receives
        flats, owns = tensors[: len(sends)], tensors[len(sends) :]
        kind = BACKWARD if _torch.is_in_backward() else FORWARD
        found = [*rounds.exchange(kind, text, [*map(Part, flats, sends, receives)]), *(own.clone() for own in owns)]
        ctx.mark_non_differentiable(*(each for each in found if not has_gradients(each.dtype)))
        ctx.which = [i for i, flat in enumerate(flats) if has_gradients(flat.dtype)]
        return (token.new_empty(0), *found)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        """The exchange of the gradients, the other way. All are on one device, so the engine knows their stream."""
        rounds, text, which, count = ctx.rounds, f"of {ctx.text}", ctx.which, len(ctx.sends)
        sends, receives = [ctx.receives[i] for i in which], [ctx.sends[i] for i in which]
        this = rounds.pass_now()
        returned: list[Any] = [None] * 2 * count
        try:
            sent, found = [grads[i].contiguous() for i in which], [grads[count + i] for i in which]
            if torch.is_grad_enabled():
                token, *found = Exchange.apply(rounds, text, sends, receives, token, *sent, *found)
            else:
                found = [*rounds.exchange(BACKWARD, text, [*map(Part, sent, sends, receives)]), *found]
        except MachinesError:
            this.is_over = True
            raise
        for at, i in enumerate(which):
            returned[i], returned[count + i] = found[at], found[len(which) + at]
        return (None, None, None, None, token, *returned)


def has_gradients(dtype: torch.dtype) -> bool:
    """True if tensors of the dtype have gradients."""
    return dtype.is_floating_point or dtype.is_complex
