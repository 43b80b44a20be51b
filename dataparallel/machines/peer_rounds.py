"""Collectives of replicas across machines: their rounds, in forwards and in passes of backward.

A form that spans machines has one `PeerRounds`, with a group of its own: a pass of backward has an open round in the
form's other group until all gradients have come, and gradients may wait for a collective here. Each collective is one
or two rounds, so machines that come to different ones raise, and none waits for a machine that is gone.

How a machine that fails is missed by nobody: a forward that has begun a collective has it begun on all machines, and
ends with a round on all of them. If it fails on one, this one's round is a failure, and all others raise in their next
round, whether that is a collective or the end. The same holds for a pass of backward that leads through a collective.
A machine that comes to no collective, because it fails before or has none, cannot know if the others come to one. It
assumes what the last forward in the same mode did; for a pass, the graph says it.

So that all machines run the backwards of collectives in one order, whatever comes first in their engines, each
collective of a forward takes a token from the one before (`PeerCall.token`): in backward it runs after those that
followed it. ``peers`` computes with what is exchanged here; the forms in ``composable`` make these objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass
from dataparallel.machines.collectives import all_to_all
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.packed import Part, packed, unpacked
from dataparallel.machines.peer_values import FORWARD, Exchange, has_gradients
from dataparallel.machines.staging import stage
from dataparallel.structures import tensors_in

__all__ = ["PeerCall", "PeerRounds"]


class PeerRounds:
    """The rounds of one form. Its calls come one after the other; passes of backward may come in any thread.

    Args:
        machines: a group that nobody else uses.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self._has_collectives: dict[Hashable, bool] = {}  # the last call in each mode

    @contextmanager
    def calling(self, mode: Hashable) -> Iterator[PeerCall]:
        """Around a call of the form. Calls of one ``mode`` are expected to have collectives if the last one had.

        Raises:
            MachinesError: another machine has failed in this forward, or is gone.
        """
        call = PeerCall(self)
        try:
            yield call
        except BaseException as error:
            if not call.is_over and (call.has_begun or self._has_collectives.get(mode, False)):
                self.machines.line.signal_failure(error)
            raise
        finally:
            call.token = None  # it leads to the graph
        is_expected = self._has_collectives.get(mode, False)
        self._has_collectives[mode] = call.has_begun
        if call.has_begun or is_expected:
            self.end("forward")

    def say(self, kind: str, text: str, value: Any) -> list[Any]:
        """What each machine says, in their order. ``text`` is equal on all; ``value`` can be pickled."""
        with _errors_of_peers():
            round = self.machines.line.begin(kind, text)
            said = round.say("what machines bring", lambda: value)
            round.close()
            found: list[Any] = said.wait()
            return found

    def exchange(self, kind: str, text: str, parts: Sequence[Part]) -> list[Tensor]:
        """What each machine has for this one, as one message: see `collectives.all_to_all`. For the current stream."""
        flat, send, receive = packed(parts)
        with _errors_of_peers():
            staged = stage(self.machines, flat, sum(receive))
            round = self.machines.line.begin(f"the values of {kind}", text)
            launched = round.launch("the values", partial(all_to_all, self.machines, staged, send, receive))
            round.close()
            found: Tensor = launched.wait()
        return unpacked(parts, found)

    def end(self, what: str) -> None:
        """The end of a forward or a pass: the machines learn if one has failed."""
        with _errors_of_peers():
            self.machines.line.begin(f"the end of a {what} with collectives across machines", "").end([]).wait()

    def pass_now(self, first: Any = None) -> _Pass:
        """The running pass of backward. ``first``: the first collective of a forward that the pass leads to."""
        found = running_pass().get(self, self._begin_pass)
        if first is None or _torch.will_engine_execute_node(first):
            found.has_collectives = True
        return found

    def _begin_pass(self, running: PassOfBackward) -> _Pass:
        found = _Pass()
        running.on_end(partial(self._end_pass, found))
        return found

    def _end_pass(self, this: _Pass, ok: bool) -> None:
        if not this.has_collectives or this.is_over:
            return
        if ok:
            self.end("backward")
        else:
            self.machines.line.signal_failure(error_of_failed_pass())


class PeerCall:
    """The collectives across machines of one forward. The replica that comes last calls it, for all of its machine.

    Attributes:
        counts: how many replicas each machine has, once `begin` has been called.
        has_begun: the machines have begun a collective.
        is_over: the forward has failed on all machines.
        token: leads to the last collective in the graph.
    """

    def __init__(self, rounds: PeerRounds) -> None:
        self.rounds = rounds
        self.rank, self.size = rounds.machines.rank, rounds.machines.size
        self.counts: list[int] | None = None
        self.has_begun = self.is_over = False
        self.token: Tensor | None = None
        self._first: Any = None
        self._number = 0

    def begin(self, count: int) -> list[int]:
        """Exchanges how many replicas each machine has, once."""
        if self.counts is None:
            self.has_begun = True
            with self._over_if_failed():
                self.counts = self.rounds.say("the first collective across machines of a forward", "", count)
        return self.counts

    def say(self, text: str, value: Any) -> list[Any]:
        """See `PeerRounds.say`."""
        with self._over_if_failed():
            return self.rounds.say(FORWARD, text, value)

    def exchange(
        self, text: str, pieces: Sequence[Sequence[Tensor]], receive: Sequence[Sequence[int]], in_graph: bool
    ) -> list[list[Tensor]]:
        """For each dtype what each machine has for this one, in their order. All of it is one message.

        Args:
            text: equal on all machines.
            pieces: for each dtype a flat tensor for each machine, all on one device.
            receive: for each dtype how many elements come from each machine; those of this one are its own piece.
            in_graph: equal on all machines: the result is in the graph, because a machine brings what is.
        """
        owns = [of_dtype[self.rank] for of_dtype in pieces]
        if self.size == 1 or not pieces:
            return [[own] for own in owns]
        self._number += 1
        text = f"{text} {[own.dtype for own in owns]}, exchange {self._number}"  # for the backward, to tell them apart
        others = [
            [own[:0] if rank == self.rank else piece for rank, piece in enumerate(of_dtype)]
            for own, of_dtype in zip(owns, pieces, strict=True)
        ]
        flats = [torch.cat(of_dtype) for of_dtype in others]
        send = [[piece.numel() for piece in of_dtype] for of_dtype in others]
        receive = [[0 if rank == self.rank else size for rank, size in enumerate(sizes)] for sizes in receive]
        with self._over_if_failed():
            if in_graph and any(has_gradients(own.dtype) for own in owns):
                token = torch.empty(0, device=flats[0].device) if self.token is None else self.token
                before = token if token.requires_grad else token.requires_grad_()
                self.token, *found = Exchange.apply(self.rounds, text, send, receive, before, *flats, *owns)
                found, owns = found[: len(flats)], found[len(flats) :]
                self._first = self._first or self.token.grad_fn
            else:
                found = self.rounds.exchange(FORWARD, text, [*map(Part, flats, send, receive)])
        parts = [[*flat.split(sizes)] for flat, sizes in zip(found, receive, strict=True)]
        for of_dtype, own in zip(parts, owns, strict=True):
            of_dtype[self.rank] = own
        return parts

    def watch(self, output: Any) -> None:
        """Passes of backward that begin with this output may lead to the collectives of this call."""
        if self._first is None:
            return
        rounds, first = self.rounds, self._first

        @_torch.not_traced
        def begins(grad: Tensor) -> None:
            rounds.pass_now(first)

        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(begins)
        self._first = None

    @contextmanager
    def _over_if_failed(self) -> Iterator[None]:
        try:
            yield
        except MachinesError:
            self.is_over = True
            raise


class _Pass:
    """A pass of backward.

    Attributes:
        has_collectives: it leads to a collective, on every machine.
        is_over: it has failed on all machines.
    """

    def __init__(self) -> None:
        self.has_collectives = self.is_over = False


@contextmanager
def _errors_of_peers() -> Iterator[None]:
    try:
        yield
    except MachinesError as error:
        error.is_of_peers = True
        raise
