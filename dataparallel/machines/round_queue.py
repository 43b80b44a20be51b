"""`RoundQueue` runs the rounds of one purpose of a group one after the other, in the same order on every rank.

The launcher's thread runs a round item by item. Before each item all ranks confirm that they have it. While one queue
waits, other queues go on. If ranks disagree on a round, or a rank fails in it, only this round ends; every other
failure breaks the group. A queue holds no tensor after it has issued the collective.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from dataparallel.comm import nccl
from dataparallel.machines.agreement import ControlChannel, Steps, agree, exchange_used
from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, copy_error, describe_error
from dataparallel.machines.health import Health, WaitCheck, is_of_network
from dataparallel.machines.rounds import Item, Round, run_call

if TYPE_CHECKING:
    from dataparallel.machines.group import MachineGroup

_Pauses = Iterator[None]
"""A generator that yields where it has to wait. The launcher's thread then runs other queues, and resumes it later."""


class RoundQueue:
    """The rounds of one purpose. ``name`` is equal on all ranks, and no other queue has it.

    Attributes:
        is_waiting: true while the queue waits for other ranks or for the issuing thread, not for a caller here.
        changed: the launcher's condition; it guards the rounds.
        call_count: how many calls of communication hooks this queue has begun.
    """

    def __init__(self, group: MachineGroup, health: Health, name: str) -> None:
        self.name, self.health, self.is_waiting = name, health, False
        self.group, self._launcher = group, health.launcher
        self.changed, self.wake = self._launcher.changed, self._launcher.wake
        self._rounds: deque[Round] = deque()
        self._control: ControlChannel | None = None  # once a round has begun on all ranks
        self._steps: Iterator[None] | None = None
        self.call_count = 0

    # ---- what forms call

    def begin_round(self, kind: str, contents: str) -> Round:
        """Adds a round. All ranks have to add their rounds in the same order. It starts when earlier rounds have ended.

        If the ranks differ in kind or contents, no rank issues anything of the round, and every wait for one of its
        results raises `MachinesDiffer`. If the group is broken, this returns a round all the same: its waits raise.

        Args:
            kind: a word for messages, ``"backward"`` for example.
            contents: lines of text that are equal on all ranks. Whatever decides the number, order, sizes and dtypes of
                the round's items has to be in the text.
        """
        return self._add(Round(self, kind, contents))

    def all_gather_object(self, kind: str, contents: str, value: Any) -> list[Any]:
        """Gathers a small object that can be pickled from each rank, in a round of its own, and waits for all."""
        this_round = self.begin_round(kind, contents)
        result = this_round.all_gather_object("what the ranks say", lambda: value)
        this_round.close()
        return cast("list[Any]", result.wait())

    def signal_failure(self, error: BaseException, until_all: bool = False) -> None:
        """Tells the other ranks that this one has failed and will not begin the round that they begin next.

        Their next round then raises `PeerFailed` with the text of ``error``. This returns at once.

        Args:
            error: why this rank has failed.
            until_all: not only their next round raises, but every round until all ranks have called this, once for each
                failure. A form asks for it if ranks may have begun different numbers of rounds when one fails.
        """
        text = f"before a round: {describe_error(error)}"
        self.health.notices.publish_failure(text)
        self._add(Round(self, "a failure", "", failure=text, until_all=until_all))

    def _add(self, this_round: Round) -> Round:
        self.health.check_process()
        with self.changed:
            if self.health.broken is not None:
                this_round.error = self.health.broken
                return this_round
            if self.health.is_closed:
                raise MachinesError("the interpreter ends: nothing can be sent any more")
            self._launcher.run_queue(self)
            self._rounds.append(this_round)
        return this_round

    # ---- what the launcher and `Health` call

    @property
    def has_rounds(self) -> bool:
        """True if a round is left, or the last one has not ended: its item may still have a number in the order."""
        return bool(self._rounds) or self._steps is not None

    def advance(self) -> None:
        """Runs the rounds until one of them has to wait, or none is left."""
        self._steps = self._steps or self._run_all()
        self.is_waiting = False
        for _ in self._steps:  # to the next pause
            return
        self._steps = None

    def drop_all(self, error: BaseException) -> None:
        """Drops all rounds, so that nothing more is issued. Every wait for one of their results raises ``error``."""
        with self.changed:
            rounds = [*self._rounds]
            if not self.health.is_closed:
                self._rounds.clear()
            self.wake()
        for this_round in rounds:
            self._drop_round(this_round, error)

    def disconnect(self) -> None:
        """Frees the connections to the other ranks."""
        self._control = None

    # ---- the launcher's thread

    def _run_all(self) -> _Pauses:
        while self._rounds:
            this_round = self._rounds[0]
            error: BaseException | None = None
            try:
                yield from self._run_round(this_round)
            except Exception as failure:
                # Breaks a reference cycle: the error's frames hold the round's results, which hold the error.
                traceback.clear_frames(failure.__traceback__)
                error = failure
                if not isinstance(failure, (PeerFailed, MachinesDiffer)):
                    what = f"the beginning of {this_round.kind!r}"
                    error = self.health.broken or self.health.break_for_lost_peer(failure, what)
            finally:
                self._launcher.order.leave(self.name)
            with self.changed:
                if self._rounds and self._rounds[0] is this_round:
                    self._rounds.popleft()
            if error is not None:
                self._drop_round(this_round, error)
            del this_round, error  # while the generator waits for another round it holds neither

    def _run_round(self, this_round: Round) -> _Pauses:
        """Runs the items of a round, from the first one to its end.

        Raises:
            PeerFailed, MachinesDiffer: only this round has failed; later rounds work.
            Exception: a peer is gone.
        """
        beginning = f"the beginning of {this_round.kind!r}"
        yield from self._connect(beginning)
        if this_round.failure is not None:
            yield from self._announce_failure(this_round, this_round.failure, beginning)
            return
        contents: str | None = this_round.contents  # `None` once the ranks have compared them, with the first item
        while True:
            while not (this_round.items and this_round.items[0].is_ready()):
                self._raise_if_broken()
                yield
            item = this_round.items[0]
            if item.kind == "close":
                return
            what = beginning if contents is not None else item.what
            yield from self._drive(
                agree(self.group, self.control, this_round.kind, f"{contents}\n{item.kind}", None), what
            )
            with self.changed:
                if not this_round.items:  # another thread has dropped the round
                    error = this_round.error or self.health.broken or MachinesError("the round has been dropped")
                    raise copy_error(error)
                this_round.items.popleft()
            try:
                yield from self._run_item(this_round, item)
            except Exception as error:
                self._fail_item(item, error)
                raise
            if item.kind == "end":
                return
            del item
            contents = None

    @property
    def control(self) -> ControlChannel:
        """The connections over which the ranks agree on what comes next."""
        assert self._control is not None
        return self._control

    def _connect(self, what: str) -> _Pauses:
        """Connects to the other ranks, once, in a thread of its own, because that blocks until all ranks have come."""
        if self._control is not None:
            return
        outcome: list[Any] = []

        def connect() -> None:
            try:
                outcome.append(ControlChannel(self.group, self.name))
            except BaseException as error:
                outcome.append(error)
            self.wake()

        threading.Thread(target=connect, name="machines: connecting", daemon=True).start()
        yield from self._pause_until(lambda: bool(outcome), what)
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        self._control = outcome[0]

    def _announce_failure(self, this_round: Round, failure: str, what: str) -> _Pauses:
        """Tells the other ranks, where they begin their next round, that this rank has failed before it."""
        try:
            while True:
                try:
                    yield from self._drive(agree(self.group, self.control, this_round.kind, "", failure), what)
                except PeerFailed as error:
                    if error.by_all or not this_round.until_all:
                        raise
        finally:
            if not (self.health.broken or self.health.is_closed):
                self.health.notices.publish_failure("")  # the others know

    def _run_item(self, this_round: Round, item: Item) -> _Pauses:
        """Runs an item after all ranks have agreed on it."""
        result, control, order = item.results[0], self.control, self._launcher.order
        if item.kind == "end":
            used = yield from self._drive(exchange_used(self.group, control, item.used, item.failure), item.what)
            with self.changed:
                self._rounds.popleft()
            result.succeed(used)
            return
        if item.kind == "all_gather_object":
            result.succeed((yield from self._drive(control.all_gather_object(item.calls[0]()), item.what)))
            return
        proposed = control.all_reduce_max(torch.tensor([order.propose(self.name)]))
        order.settle(self.name, int((yield from self._drive(proposed, item.what))))
        self.wake()
        yield from self._pause_until(lambda: order.is_first(self.name), item.what)
        issued = self._launcher.issuing.put(partial(self._issue, this_round, item))
        issued.add_done_callback(self.wake)
        order.leave(self.name)  # items with larger numbers come behind it in the issuing thread's queue
        self.wake()
        while not issued.done():
            self._raise_if_broken()  # the call may block for ever; then this stops waiting for it
            yield
        issued.result()

    def _drive(self, steps: Steps, what: str) -> Any:
        """Runs an exchange over the control channel, pausing until each of its futures is done. Returns its result."""
        value = None
        with WaitCheck(self.health, what) as check:
            try:
                while True:
                    future = steps.send(value)
                    future.add_done_callback(self.wake)
                    yield from self._pause_until(future.done, what, check)
                    try:
                        value = future.value()
                    except Exception as error:
                        raise copy_error(self.health.break_for_lost_peer(error, what)) from error
            except StopIteration as end:
                return end.value

    def _pause_until(self, is_over: Callable[[], bool], what: str, check: WaitCheck | None = None) -> _Pauses:
        """Pauses until ``is_over`` returns true. ``check``: one that is open already, or ``None`` for a new one."""
        with nullcontext(check) if check is not None else WaitCheck(self.health, what) as open_check:
            while not is_over():
                open_check()
                self.is_waiting = True
                yield

    def _raise_if_broken(self) -> None:
        if self.health.broken is not None:
            raise copy_error(self.health.broken)

    # ---- the issuing thread

    def _issue(self, this_round: Round, item: Item) -> None:
        self._raise_if_broken()  # while this waited behind other calls: the other ranks would not join the collective
        if item.kind == "call":
            run_call(self, this_round, item)
            return
        # Held for all devices of the item, so that other launches on them come before it or after it on each.
        with nccl.launching() if self.group.has_nccl else nullcontext():
            for result, call in zip(item.results, item.calls, strict=True):
                value = call()
                if isinstance(value, Transfer):
                    value.when_done(self.wake)
                result.succeed(value)

    # ---- ends

    def _fail_item(self, item: Item, error: Exception) -> None:
        undecided = [result for result in item.results if not result.is_decided]
        if undecided and not isinstance(error, MachinesError):
            if is_of_network(error):
                error = self.health.break_for_lost_peer(error, undecided[0].what)
            else:
                self.health.break_for_own_failure(error, undecided[0].what)
        for result in undecided:
            result.fail(error)

    def _drop_round(self, this_round: Round, error: BaseException) -> None:
        with self.changed:
            this_round.error = error
            items = [*this_round.items]
            this_round.items.clear()
        for item in items:
            for result in item.results:
                result.fail(error)
        self.wake()
