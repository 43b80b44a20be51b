"""Collectives of replicas across machines: their rounds, and the node of the graph in which machines exchange values.

A form that spans machines has one `PeerRounds`. Its queue is another one than that of the gradients' sums: a backward
may need a collective of replicas while the round of these sums is open.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataparallel import _torch
from dataparallel.autograd.node import Node
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass
from dataparallel.batches.structures import tensors_in
from dataparallel.machines.collectives import ALIGNED, all_to_all, stage
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines

_FORWARD, _BACKWARD = "a collective across machines", "the backward of a collective across machines"


class PeerRounds:
    """The rounds of one form: one or two for each collective, and one at the end of a forward or backward that has any.

    A machine that fails signals that instead of its next round, in which the others raise. If it fails before its first
    collective, it has to guess if the others come to one: a forward does what the last one in the same mode did, and of
    a backward the graph says it.
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
        is_expected = self._has_collectives.get(mode, False)
        try:
            yield call
        except BaseException as error:
            if not call.is_over and (call.has_begun or is_expected):
                self.machines.queue.signal_failure(error)
            raise
        finally:
            call.token = None  # it leads to the graph
        self._has_collectives[mode] = call.has_begun
        if call.has_begun or is_expected:
            self._end_together("forward")

    def say(self, kind: str, text: str, value: Any) -> list[Any]:
        """What each machine says, in their order. ``text`` is equal on all; ``value`` can be pickled."""
        with _errors_of_peers():
            return self.machines.queue.all_say(kind, text, value)

    def exchange(self, kind: str, text: str, parts: Sequence[Part]) -> list[Tensor]:
        """What each machine has for this one, as one message: see `collectives.all_to_all`. For the current stream."""
        flat, send, receive = _packed(parts)
        with _errors_of_peers():
            staged = stage(self.machines, flat, sum(receive))
            round = self.machines.queue.begin_round(f"the values of {kind}", text)
            launched = round.launch("the values", partial(all_to_all, self.machines, staged, send, receive))
            round.close()
            found: Tensor = launched.wait()
        return _unpacked(parts, found)

    def expect_in_backward(self) -> None:
        """The running pass of backward has a collective, on every machine: so all of them end it with a round."""
        running = running_pass()
        if running.is_first((self, "end")):
            running.on_end(partial(self._end_backward, running))

    def note_failed_backward(self) -> None:
        """The running pass has failed on all machines, which know it."""
        running_pass().contents[self, "failed"] = True

    def _end_backward(self, running: PassOfBackward, ok: bool) -> None:
        if (self, "failed") in running.contents:
            return
        if ok:
            self._end_together("backward")
        else:
            self.machines.queue.signal_failure(error_of_failed_pass())

    def _end_together(self, what: str) -> None:
        """The machines learn if one has failed."""
        with _errors_of_peers():
            self.machines.queue.begin_round(f"the end of a {what} with collectives across machines", "").end([]).wait()


class PeerCall:
    """The collectives across machines of one forward. The replica that comes last calls it, for all of its machine.

    Each collective takes a token from the one before, and in backward runs after those that followed it: so all
    machines run the backwards in one order, whatever comes first in their engines.

    Attributes:
        counts: how many replicas each machine has, once `exchange_counts` has been called.
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

    def exchange_counts(self, count: int) -> None:
        """Begins the first collective: the machines say how many replicas each of them has."""
        self.has_begun = True
        with self._over_if_failed():
            self.counts = self.rounds.say("the first collective across machines of a forward", "", count)

    def say(self, text: str, value: Any) -> list[Any]:
        """See `PeerRounds.say`."""
        with self._over_if_failed():
            return self.rounds.say(_FORWARD, text, value)

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
            if in_graph and any(_has_gradients(own.dtype) for own in owns):
                token = torch.empty(0, device=flats[0].device) if self.token is None else self.token
                before = token if token.requires_grad else token.requires_grad_()
                self.token, *found = _Exchange.apply(self.rounds, text, send, receive, before, *flats, *owns)
                found, owns = found[: len(flats)], found[len(flats) :]
                self._first = self._first or self.token.grad_fn
            else:
                found = self.rounds.exchange(_FORWARD, text, [*map(Part, flats, send, receive)])
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
        def look_ahead(grad: Tensor) -> None:
            if _torch.will_engine_execute_node(first):
                rounds.expect_in_backward()

        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(look_ahead)
        self._first = None

    @contextmanager
    def _over_if_failed(self) -> Iterator[None]:
        try:
            yield
        except MachinesError:
            self.is_over = True
            raise


class _Exchange(Node):
    """``_Exchange.apply(rounds, text, sends, receives, token, *flats, *owns)``: another token, what has come, and owns.

    Each of ``flats`` is a `Part` with the sizes of ``sends`` and ``receives``; all of them are one message, there and
    back. ``owns`` are what this machine has for itself. They pass through the node, so that a backward through any
    result comes here, on every machine. The tokens have no elements.
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
        kind = _BACKWARD if _torch.is_in_backward() else _FORWARD
        found = [*rounds.exchange(kind, text, [*map(Part, flats, sends, receives)]), *(own.clone() for own in owns)]
        ctx.mark_non_differentiable(*(each for each in found if not _has_gradients(each.dtype)))
        ctx.which = [i for i, flat in enumerate(flats) if _has_gradients(flat.dtype)]
        return (token.new_empty(0), *found)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        """The exchange of the gradients, the other way. All are on one device, so the engine knows their stream."""
        rounds, text, which, count = ctx.rounds, f"of {ctx.text}", ctx.which, len(ctx.sends)
        sends, receives = [ctx.receives[i] for i in which], [ctx.sends[i] for i in which]
        rounds.expect_in_backward()
        returned: list[Any] = [None] * 2 * count
        try:
            sent, found = [grads[i].contiguous() for i in which], [grads[count + i] for i in which]
            if torch.is_grad_enabled():
                token, *found = _Exchange.apply(rounds, text, sends, receives, token, *sent, *found)
            else:
                found = [*rounds.exchange(_BACKWARD, text, [*map(Part, sent, sends, receives)]), *found]
        except MachinesError:
            rounds.note_failed_backward()
            raise
        for at, i in enumerate(which):
            returned[i], returned[count + i] = found[at], found[len(which) + at]
        return (None, None, None, None, token, *returned)


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@contextmanager
def _errors_of_peers() -> Iterator[None]:
    try:
        yield
    except MachinesError as error:
        error.is_of_peers = True
        raise


# ---- tensors of several dtypes as one message, in bytes --------------------------------------------------------------


class Part(NamedTuple):
    """One tensor of an exchange: 1-D, with what goes to each machine one after the other; sizes are in elements."""

    flat: Tensor
    send: Sequence[int]
    receive: Sequence[int]


def _packed(parts: Sequence[Part]) -> Part:
    """The parts as one. A single one stays as it is."""
    if len(parts) == 1:
        return parts[0]
    rows = [[_bytes(piece) for piece in part.flat.split([*part.send])] for part in parts]
    messages = [*zip(*rows, strict=True)]
    flat = torch.cat([piece for message in messages for piece in message])
    send = [sum(piece.numel() for piece in message) for message in messages]
    return Part(flat, send, [sum(sizes) for sizes in zip(*map(_room, parts), strict=True)])


def _unpacked(parts: Sequence[Part], found: Tensor) -> list[Tensor]:
    """What has come for each part: from each machine, one after the other."""
    if len(parts) == 1:
        return [found]
    pieces: list[list[Tensor]] = [[] for _ in parts]
    sizes = [room for of_machine in zip(*map(_room, parts), strict=True) for room in of_machine]
    for at, first in enumerate([0, *accumulate(sizes)][:-1]):
        part, machine = parts[at % len(parts)], at // len(parts)
        used = part.receive[machine] * part.flat.element_size()
        pieces[at % len(parts)].append(found[first : first + used].view(part.flat.dtype))
    return [torch.cat(of_part) for of_part in pieces]


def _room(part: Part) -> list[int]:
    """The bytes that come from each machine."""
    return [-(-size * part.flat.element_size() // ALIGNED) * ALIGNED for size in part.receive]


def _bytes(piece: Tensor) -> Tensor:
    found = piece.contiguous().view(torch.uint8)
    return pad(found, (0, -found.numel() % ALIGNED))
