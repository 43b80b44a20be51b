"""`Exchange`: the node of the graph in which machines exchange values of a collective.

Its backward is an exchange the other way, so it can be differentiated as often as you like. Only ``peer_rounds`` calls
it. The collectives themselves are made of this node and of operators of torch (``peers.across_machines``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node
from dataparallel.machines.errors import MachinesError
from dataparallel.streams.nodes import forward_streams_set, note_forward_streams

__all__ = ["BACKWARD", "FORWARD", "Exchange", "Rounds"]

FORWARD, BACKWARD = "a collective across machines", "the backward of a collective across machines"


class Rounds(Protocol):
    """What the node needs of ``peer_rounds.PeerRounds``."""

    def exchange(self, kind: str, text: str, flat: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """What each machine has for this one."""

    def pass_now(self) -> Any:
        """The running pass of backward. Its ``is_over`` is set if it has failed on all machines."""


class Exchange(Node):
    """``Exchange.apply(rounds, text, send, receive, token, flat, own)``: another token, what has come, and ``own``.

    ``flat`` has what goes to each machine, one after the other, in sizes ``send``; the result has what has come from
    each, in sizes ``receive``. ``own`` is what this machine has for itself. It passes through the node, so that a
    backward through any result comes here, on every machine. The token has no elements. It orders the backwards: a node
    runs after the one that took its token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rounds: Rounds,
        text: str,
        send: Sequence[int],
        receive: Sequence[int],
        token: Tensor,
        flat: Tensor,
        own: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The exchange; the host waits for what comes."""
        ctx.rounds, ctx.text, ctx.send, ctx.receive = rounds, text, send, receive
        note_forward_streams(ctx, [flat.device], [flat.device])
        kind = BACKWARD if _torch.is_in_backward() else FORWARD
        found = rounds.exchange(kind, text, flat, send, receive)
        return token.new_empty(0), found, own.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor, grad: Tensor, of_own: Tensor) -> tuple[Any, ...]:
        """The exchange of the gradients, the other way."""
        rounds, text = ctx.rounds, f"of {ctx.text}"
        this, nothing = rounds.pass_now(), (None,) * 4
        with forward_streams_set(ctx, [grad]):
            try:
                sent = grad.contiguous()
                if torch.is_grad_enabled():
                    return (*nothing, *Exchange.apply(rounds, text, ctx.receive, ctx.send, token, sent, of_own))
                return (*nothing, token, rounds.exchange(BACKWARD, text, sent, ctx.receive, ctx.send), of_own)
            except MachinesError:
                this.is_over = True
                raise
