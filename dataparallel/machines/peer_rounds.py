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
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass
from dataparallel.batches.structures import tensors_in
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Machines

_FORWARD, _BACKWARD = "a collective across machines", "the backward of a collective across machines"
Sizes: TypeAlias = Sequence[Sequence[int]]


class PeerRounds:
    """The collectives of one form, and a word at the end of a forward or backward with any, so that all fail together.

    A machine that fails tells the others if they wait for it. If it fails before its first collective, it has to guess
    whether they begin one. It expects of a forward what the last forward in the same mode did. For a backward the graph
    says it.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self._lane = machines.lane("peers")
        self._has_collectives: dict[Hashable, bool] = {}  # for each mode, whether the last call had any

    @contextmanager
    def calling(self, mode: Hashable, others_wait: Callable[[], bool]) -> Iterator[PeerCall]:
        """Wraps a call of the form. It expects collectives if the last call in this ``mode`` had any.

        ``others_wait``: true if other machines would wait without collectives too for a call that has failed here.
        """
        call, is_expected = PeerCall(self, self.machines.begin_call()), self._has_collectives.get(mode, False)
        try:
            yield call
            self._has_collectives[mode] = call.has_begun
            if call.has_begun or is_expected:
                self.all_gather_object("the end of a forward with collectives across machines", "", None, call.epoch)
        except BaseException as error:
            if call.has_begun or is_expected or others_wait():
                self.machines.state.leave(call.epoch, error)
            raise
        finally:
            call.token = None  # the token holds the graph

    def all_gather_object(self, kind: str, text: str, value: Any, epoch: int) -> list[Any]:
        """Gathers an object that can be pickled from each machine, in rank order. ``text`` is equal on all machines."""
        found: list[Any] = self._lane.gather(kind, text, value, epoch=epoch).wait()
        return found

    def exchange(
        self, kind: str, text: str, flats: Sequence[Tensor], sends: Sizes, receives: Sizes, epoch: int
    ) -> list[Tensor]:
        """Exchanges 1-D tensors, each with the pieces for all machines in rank order, of sizes in elements.

        The results are ready for the current stream.
        """
        sized = zip(flats, sends, receives, strict=True)
        calls = [partial(stage(self.machines, flat, sum(to)).all_to_all, send, to) for flat, send, to in sized]
        names = ["the values"] * len(calls)
        results = self._lane.launch(kind, names, calls, f"the values of {kind}\n{text}", epoch=epoch)
        return [result.wait() for result in results]

    def expect_in_backward(self) -> int:
        """Ends the running pass of backward with a word, because the pass has a collective on every machine.

        Returns the epoch in which the pass has begun.
        """
        return running_pass().get(self, self._begin_backward)

    def _begin_backward(self, running: PassOfBackward) -> int:
        epoch = self.machines.begin_pass()
        running.on_end(partial(self._end_backward, epoch))
        return epoch

    def _end_backward(self, epoch: int, ok: bool) -> None:
        if ok:
            self.all_gather_object("the end of a backward with collectives across machines", "", None, epoch)
        else:
            self.machines.state.leave(epoch, error_of_failed_pass())


class PeerCall:
    """The collectives across machines of one forward. On each machine the last replica to arrive calls its methods.

    In the graph each collective takes a token from the collective before. So backward runs them in the reverse order on
    all machines, whatever the engine of each machine would run first.

    Attributes:
        counts: how many replicas each machine has, once `exchange_counts` has been called.
        token: a tensor without elements that the last collective in the graph has returned.
    """

    def __init__(self, rounds: PeerRounds, epoch: int) -> None:
        self.rounds, self.epoch = rounds, epoch
        self.rank, self.size = rounds.machines.rank, rounds.machines.size
        self.counts: list[int] | None = None
        self.has_begun = False
        self.token: Tensor | None = None
        self._first_node: Any = None
        self._number = 0

    def exchange_counts(self, count: int) -> None:
        """Begins the first collective. The machines gather how many replicas each of them has."""
        self.has_begun = True
        kind = "the first collective across machines of a forward"
        self.counts = self.rounds.all_gather_object(kind, "", count, self.epoch)

    def all_gather_object(self, text: str, value: Any) -> list[Any]:
        return self.rounds.all_gather_object(_FORWARD, text, value, self.epoch)

    def exchange(
        self, text: str, pieces: Sequence[Sequence[Tensor]], receive: Sequence[Sequence[int]], in_graph: bool
    ) -> list[list[Tensor]]:
        """Sends a piece to each machine, for all dtypes at once. Returns for each dtype the pieces in rank order.

        ``pieces``: for each dtype a flat tensor for each machine, all on one device. ``receive``: how many elements
        come from each. A machine's own piece is not sent. ``text`` and ``in_graph`` are equal on all machines: true if
        pieces of any of them need gradients. The results are in the graph then.
        """
        own_pieces = [of_dtype[self.rank] for of_dtype in pieces]
        if self.size == 1 or not pieces:
            return [[own] for own in own_pieces]
        self._number += 1
        text = f"{text} {[own.dtype for own in own_pieces]}, exchange {self._number}"  # backward compares the number
        sent_pieces = [
            [own[:0] if rank == self.rank else piece for rank, piece in enumerate(of_dtype)]
            for own, of_dtype in zip(own_pieces, pieces, strict=True)
        ]
        flats = [torch.cat(of_dtype) for of_dtype in sent_pieces]
        send = [[piece.numel() for piece in of_dtype] for of_dtype in sent_pieces]
        receive = [[0 if rank == self.rank else size for rank, size in enumerate(sizes)] for sizes in receive]
        if in_graph and any(_is_differentiable(own.dtype) for own in own_pieces):
            token = torch.empty(0, device=flats[0].device) if self.token is None else self.token
            before = token if token.requires_grad else token.requires_grad_()
            rounds, epoch = self.rounds, self.epoch
            self.token, *outputs = _Exchange.apply(rounds, epoch, text, send, receive, before, *flats, *own_pieces)
            received, own_pieces = outputs[: len(flats)], outputs[len(flats) :]
            self._first_node = self._first_node or self.token.grad_fn
        else:
            received = self.rounds.exchange(_FORWARD, text, flats, send, receive, self.epoch)
        results = [[*flat.split(sizes)] for flat, sizes in zip(received, receive, strict=True)]
        for of_dtype, own in zip(results, own_pieces, strict=True):
            of_dtype[self.rank] = own
        return results

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
    """``token, *received, *own = _Exchange.apply(rounds, epoch, text, sends, receives, token, *flats, *own_pieces)``.

    ``flats``, ``sends`` and ``receives`` are those of `PeerRounds.exchange`. ``own_pieces``, which this machine keeps,
    pass through the node, so that a backward through any result runs this node, on every machine.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rounds: PeerRounds,
        epoch: int,
        text: str,
        sends: Sizes,
        receives: Sizes,
        token: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.rounds, ctx.text, ctx.sends, ctx.receives = rounds, text, sends, receives
        flats, own_pieces = tensors[: len(sends)], tensors[len(sends) :]
        kind = _BACKWARD if _torch.is_in_backward() else _FORWARD
        received = rounds.exchange(kind, text, flats, sends, receives, epoch)
        outputs = [*received, *(own.clone() for own in own_pieces)]
        ctx.mark_non_differentiable(*(output for output in outputs if not _is_differentiable(output.dtype)))
        ctx.differentiable = [i for i, flat in enumerate(flats) if _is_differentiable(flat.dtype)]
        return (token.new_empty(0), *outputs)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        """Sends the gradients the other way. All of them are on one device, so the engine knows their stream."""
        rounds, text, indices, count = ctx.rounds, f"of {ctx.text}", ctx.differentiable, len(ctx.sends)
        sends, receives = [ctx.receives[i] for i in indices], [ctx.sends[i] for i in indices]
        epoch = rounds.expect_in_backward()
        returned: list[Any] = [None] * 2 * count
        sent, own_grads = [grads[i].contiguous() for i in indices], [grads[count + i] for i in indices]
        if torch.is_grad_enabled():
            token, *found = _Exchange.apply(rounds, epoch, text, sends, receives, token, *sent, *own_grads)
        else:
            found = [*rounds.exchange(_BACKWARD, text, sent, sends, receives, epoch), *own_grads]
        for position, i in enumerate(indices):
            returned[i], returned[count + i] = found[position], found[len(indices) + position]
        return (None, None, None, None, None, token, *returned)


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
