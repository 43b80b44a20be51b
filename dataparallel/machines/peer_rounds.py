"""`PeerRounds` runs the collectives of replicas across machines, for one form. Each of its forwards has a `PeerCall`,
and values travel in `_Exchange`, a node of the graph, whose backward sends gradients the other way.

They have a lane of their own: a backward may need a collective of replicas while gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.node import Node
from dataparallel.autograd.pass_of_backward import error_of_failed_pass, running_pass
from dataparallel.batches.structures import tensors_in
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane, Machines

_FORWARD, _BACKWARD = "a collective across machines", "the backward of a collective across machines"
Sizes: TypeAlias = Sequence[Sequence[int]]


class PeerRounds:
    """The collectives of one form, and a word at the end of a forward or backward with any, so that all fail together.

    A machine that fails before its first collective has to guess whether others begin one. It expects of a forward what
    the last forward in the same mode did. For a backward the graph says it.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self._lane = Lane(machines, "peers")
        self._has_collectives: dict[Hashable, bool] = {}  # for each mode, whether the last call had any

    @contextmanager
    def calling(self, mode: Hashable, others_wait: Callable[[], bool]) -> Iterator[PeerCall]:
        """Wraps a call of the form. It expects collectives if the last call in this ``mode`` had any.

        ``others_wait``: true if other machines would wait without collectives too for a call that has failed here.
        """
        call, is_expected = PeerCall(self), self._has_collectives.get(mode, False)
        try:
            yield call
            self._has_collectives[mode] = call.has_begun
            if call.has_begun or is_expected:
                self.gather("the end of a forward with collectives across machines", "", None)
        except BaseException as error:
            if call.has_begun or is_expected or others_wait():
                self.machines.state.fail(error)
            raise
        finally:
            call.token = None  # the token holds the graph

    def gather(self, kind: str, text: str, value: Any) -> list[Any]:
        """Gathers an object that can be pickled from each machine, in rank order. ``text`` is equal on all machines."""
        found: list[Any] = self._lane.gather(kind, text, value).wait()
        return found

    def exchange(self, kind: str, text: str, flats: Sequence[Tensor], sends: Sizes, receives: Sizes) -> list[Tensor]:
        """Exchanges 1-D tensors, each with the pieces for all machines in rank order, of sizes in elements."""
        sized = zip(flats, sends, receives, strict=True)
        calls = [partial(stage(self.machines, flat, sum(to)).all_to_all, send, to) for flat, send, to in sized]
        results = self._lane.launch(kind, ["the values"] * len(calls), calls, f"the values of {kind}\n{text}")
        return [result.wait() for result in results]

    def expect_in_backward(self) -> None:
        """Ends the running pass of backward with a word, because the pass has a collective on every machine."""
        running = running_pass()
        if running.is_first(self):
            running.on_end(self._end_backward)

    def _end_backward(self, ok: bool) -> None:
        if ok:
            self.gather("the end of a backward with collectives across machines", "", None)
        else:
            self.machines.state.fail(error_of_failed_pass())


class PeerCall:
    """The collectives across machines of one forward. On each machine the last replica to arrive calls its methods.

    In the graph each collective takes a token from the collective before. So backward runs them in the reverse order on
    all machines, whatever the engine of each machine would run first.

    Attributes:
        counts: how many replicas each machine has, once `exchange_counts` has been called.
        token: a tensor without elements that the last collective in the graph has returned.
    """

    def __init__(self, rounds: PeerRounds) -> None:
        self.rounds, self.rank, self.size = rounds, rounds.machines.rank, rounds.machines.size
        self.counts: list[int] | None = None
        self.has_begun = False
        self.token: Tensor | None = None
        self._first_node: Any = None
        self._number = 0

    def exchange_counts(self, count: int) -> None:
        """Begins the first collective. The machines gather how many replicas each of them has."""
        self.has_begun = True
        self.counts = self.rounds.gather("the first collective across machines of a forward", "", count)

    def all_gather_object(self, text: str, value: Any) -> list[Any]:
        return self.rounds.gather(_FORWARD, text, value)

    def exchange(
        self, text: str, pieces: Sequence[Sequence[Tensor]], in_graph: bool, receive: Sizes | None = None
    ) -> list[list[Tensor]]:
        """Sends a piece to each machine, for all dtypes at once. Returns for each dtype the pieces in rank order.

        ``pieces``: for each dtype a flat tensor for each machine, all on one device. ``text`` and ``in_graph`` are
        equal on all machines: true if pieces of any of them need gradients. The results are in the graph then.
        ``receive``: how many elements come from each, if not as many as go there.
        """
        if self.size == 1 or not pieces:
            return [[*of_dtype] for of_dtype in pieces]
        flats = [torch.cat([*of_dtype]) for of_dtype in pieces]
        send = [[piece.numel() for piece in of_dtype] for of_dtype in pieces]
        receive = receive or send
        self._number += 1
        text = f"{text} {[flat.dtype for flat in flats]}, exchange {self._number}"  # backward compares the number
        if in_graph and any(_is_differentiable(flat) for flat in flats):
            token = torch.empty(0, device=flats[0].device) if self.token is None else self.token
            before = token if token.requires_grad else token.requires_grad_()
            self.token, *received = _Exchange.apply(self.rounds, text, send, receive, before, *flats)
            self._first_node = self._first_node or self.token.grad_fn
        else:
            received = self.rounds.exchange(_FORWARD, text, flats, send, receive)
        return [[*flat.split([*sizes])] for flat, sizes in zip(received, receive, strict=True)]

    def expect_backward_of(self, output: Any) -> None:
        """Adds hooks to ``output`` that tell `PeerRounds` if a backward from there will run this call's collectives."""
        if self._first_node is None:
            return
        rounds, first_node = self.rounds, self._first_node

        @_torch.not_traced
        def look_ahead(grad: Tensor) -> None:
            if _torch.will_engine_execute_node(first_node):
                rounds.expect_in_backward()

        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(look_ahead)
        self._first_node = None


class _Exchange(Node):
    """``token, *received = _Exchange.apply(rounds, text, sends, receives, token, *flats)``.

    ``flats``, ``sends`` and ``receives`` are those of `PeerRounds.exchange`. A machine sends to itself too, so that a
    backward through any result runs this node, on every machine.
    """

    @staticmethod
    def forward(
        ctx: Any, rounds: PeerRounds, text: str, sends: Sizes, receives: Sizes, token: Tensor, *flats: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rounds, ctx.text, ctx.sends, ctx.receives = rounds, text, sends, receives
        received = rounds.exchange(_BACKWARD if _torch.is_in_backward() else _FORWARD, text, flats, sends, receives)
        ctx.mark_non_differentiable(*(output for output in received if not _is_differentiable(output)))
        ctx.differentiable = [i for i, flat in enumerate(flats) if _is_differentiable(flat)]
        return (token.new_empty(0), *received)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        """Sends the gradients the other way. All of them are on one device, so the engine knows their stream."""
        rounds, text, indices = ctx.rounds, f"of {ctx.text}", ctx.differentiable
        sends, receives = [ctx.receives[i] for i in indices], [ctx.sends[i] for i in indices]
        rounds.expect_in_backward()
        sent = [grads[i].contiguous() for i in indices]
        if torch.is_grad_enabled():
            token, *found = _Exchange.apply(rounds, text, sends, receives, token, *sent)
        else:
            found = rounds.exchange(_BACKWARD, text, sent, sends, receives)
        by_index = dict(zip(indices, found, strict=True))
        return (None, None, None, None, token, *(by_index.get(i) for i in range(len(grads))))


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
