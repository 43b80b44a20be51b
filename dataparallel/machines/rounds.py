"""`Round`: the collectives that all ranks issue together, in one backward for example. `PendingResult`: one's future.

A round begins with a text that has to be equal on all ranks (`RoundQueue.begin_round`), has collectives in one order,
and an end. Its methods may be called by any thread and return at once. Every failure ends every wait. `RoundQueue` runs
the rounds of one purpose one after the other, in the same order on every rank, and holds no tensor of an issued one.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.futures import Future

from dataparallel.comm import nccl
from dataparallel.machines.agreement import ControlChannel, Steps, agree, error_of_failures, exchange_used
from dataparallel.machines.collectives import Staged, Transfer
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed, copy_error, describe_error
from dataparallel.machines.health import SLICE, Check, Health, WaitCheck, is_of_network

if TYPE_CHECKING:
    from dataparallel.machines.group import MachineGroup


GRACE = 2.0
"""Seconds that a communication hook has to end here after it has failed on another rank."""


class PendingResult:
    """The future of one item of a round. Messages call the item ``what``."""

    def __init__(self, what: str, health: Health) -> None:
        self.what = what
        self._health = health
        self._decided = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """The tensor of a collective, the list of gathered objects, or the list of bool of an end.

        A tensor is ready for the calling thread's current stream. Raises a `MachinesError`, or what a collective or a
        communication hook has raised on this rank.
        """
        self._health.check_process()
        with WaitCheck(self._health, self.what) as check:
            _wait_for_event(self._decided, check)
            if self._error is not None:
                raise copy_error(self._error)
            if isinstance(self._result, Transfer):
                # A transfer can be waited for once, so its tensor replaces it here for a second wait.
                try:
                    self._result = self._result.wait(check)
                except MachinesError:
                    raise
                except RuntimeError as error:
                    raise copy_error(self._health.break_for_lost_peer(error, self.what)) from error
            return self._result

    @property
    def is_decided(self) -> bool:
        """True if the item has been issued or has failed."""
        return self._decided.is_set()

    def has_arrived(self) -> bool:
        """True if `received` does not block, as far as the backend can tell."""
        return self.is_decided and (not isinstance(self._result, Transfer) or self._result.has_arrived())

    def received(self) -> Staged:
        """The tensor that a collective has received, not copied to a device yet: the issuing thread sends it on."""
        if self._error is not None:
            raise copy_error(self._error)
        transfer: Transfer = self._result
        return transfer.received()

    def succeed(self, result: Any) -> None:
        """The item has been issued, with a `Transfer`, or has its result."""
        self._result = result
        self._decided.set()

    def fail(self, error: BaseException) -> None:
        """The item has failed, or will not be issued."""
        self._error = error
        self._decided.set()


@dataclass
class Item:
    """One step of a round.

    Attributes:
        kind: the ``calls`` of a "collective" are issued together, and each returns a `Transfer`. Those of a "call" are
            ``begin`` and ``check`` of a hook. That of an "all_gather_object" returns this rank's object.
        results: the callers' futures: a "collective" has one for each call, a "close" none, another item one.
        after: results that have to arrive before this item is issued.
        used, failure: only of an "end": see `Round.end`.
    """

    kind: Literal["collective", "call", "all_gather_object", "end", "close"]
    results: Sequence[PendingResult]
    calls: Sequence[Callable[[], Any]] = ()
    after: Sequence[PendingResult] = ()
    used: Sequence[bool] = ()
    failure: str | None = None

    @property
    def what(self) -> str:
        """The item's name in messages."""
        return self.results[0].what

    def is_ready(self) -> bool:
        """True if this rank can issue the item."""
        return all(result.has_arrived() for result in self.after)


class Round:
    """One round: see `RoundQueue.begin_round`.

    Attributes:
        failure: if the round only announces that this rank has failed (`RoundQueue.signal_failure`), the reason.
        until_all: if so, the round announces it until all ranks announce a failure.
        items: those that have not been issued yet.
        error: why the round was dropped.
        call_error: why a communication hook of the round has failed, here or on another rank.
    """

    def __init__(
        self, queue: RoundQueue, kind: str, contents: str, failure: str | None = None, until_all: bool = False
    ) -> None:
        self.kind, self.contents, self.failure, self.until_all = kind, contents, failure, until_all
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.call_error: BaseException | None = None
        self._queue = queue
        self._is_ended = failure is not None

    def launch(
        self, what: str, collective: Callable[[], Transfer], after: Sequence[PendingResult] = ()
    ) -> PendingResult:
        """Adds a collective. The issuing thread calls ``collective`` in the order in which items were added.

        ``collective`` has to issue the same on every rank, over the queue's group or a part of it. If it raises, the
        wait for its result raises too, and the group is broken: the messages of the other ranks have no partner. It is
        issued when the results ``after``, whose tensors it sends on, have arrived.
        """
        return self.launch_together([what], [collective], after)[0]

    def launch_together(
        self, what: Sequence[str], collectives: Sequence[Callable[[], Transfer]], after: Sequence[PendingResult] = ()
    ) -> list[PendingResult]:
        """As `launch`, for one collective on each of several devices. On none of them another launch comes between."""
        results = [self._new_result(name) for name in what]
        if results:
            self._add(Item("collective", results, collectives, after))
        return results

    def call(self, what: str, begin: Callable[[], Future[Any]], check: Callable[[], object]) -> PendingResult:
        """Adds a communication hook: ``begin`` calls the hook, which may send anything itself, and returns its future.

        The issuing thread calls ``begin``, waits for the future, calls ``check``, and issues nothing else of any group
        meanwhile. If ``begin`` or ``check`` raises on a rank, later hooks of the round are not called, all ranks' waits
        for hooks raise, and the next round works. But if a message gets no answer, the group is broken.
        """
        result = self._new_result(what)
        self._add(Item("call", [result], [begin, check]))
        return result

    def all_gather_object(self, what: str, value: Callable[[], Any]) -> PendingResult:
        """Gathers a small object from each rank. The launcher's thread calls ``value``, which returns this rank's."""
        result = self._new_result(what)
        self._add(Item("all_gather_object", [result], [value]))
        return result

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> PendingResult:
        """Ends the round. The result says for each entry of ``used`` if it is true on any rank.

        With ``error``, why this rank has failed, every rank's wait raises `PeerFailed`. This rank still has to launch
        every collective that the other ranks launch in the round, with zeros for example.
        """
        failure = None if error is None else f"in {self.kind!r}: {describe_error(error)}"
        result = self._new_result("the end")
        self._add(Item("end", [result], used=list(used), failure=failure))
        return result

    def close(self) -> None:
        """Ends the round without an exchange. So no rank can announce a failure in the round."""
        self._add(Item("close", []))

    def _new_result(self, what: str) -> PendingResult:
        return PendingResult(f"{what} of {self.kind!r}", self._queue.health)

    def _add(self, item: Item) -> None:
        self._queue.health.check_process()
        with self._queue.changed:
            if self._is_ended:
                raise RuntimeError(f"the round {self.kind!r} has ended: nothing can be added to it")
            self._is_ended = item.kind in ("end", "close")
            error = self.error or self._queue.health.broken
            if error is None:
                self.items.append(item)
                self._queue.wake()
                return
        for result in item.results:
            result.fail(error)


def run_call(queue: RoundQueue, this_round: Round, item: Item) -> None:
    """Runs a communication hook, which sends messages over a group of the user.

    After the hook all ranks gather their failures. But if the hook fails on one rank, it may wait on others for
    messages that never come, so the failure is published at once too. If a hook still waits `GRACE` seconds after its
    rank has read that, its messages get no answer and would be paired with later collectives: the group is broken.
    """
    (result,), (begin, check_result) = item.results, item.calls
    if this_round.call_error is None:
        queue.call_count += 1
        key, failure = f"call {queue.call_count} of {queue.name}", None
        with WaitCheck(queue.health, item.what) as check:
            try:
                _wait_for_future(begin(), _grace_check(check, queue.health, key))
                check_result()
            except (MachinesError, _Unanswered):
                raise
            except Exception as error:
                failure = error
                result.fail(error)
                queue.health.notices.publish(key, describe_error(error))
            steps = queue.control.all_gather_object(None if failure is None else f": {describe_error(failure)}")
            failures = _drive(steps, check)  # on each rank, also where it has failed
            this_round.call_error = failure or error_of_failures(queue.group, failures)
    if this_round.call_error is None:
        result.succeed(None)
    elif not result.is_decided:
        result.fail(this_round.call_error)


def _drive(steps: Steps, check: Check) -> Any:
    """Runs an exchange over the control channel, and blocks until each of its futures is done."""
    value = None
    try:
        while True:
            future = steps.send(value)
            _wait_for_future(future, check)
            value = future.value()
    except StopIteration as end:
        return end.value


def _grace_check(wait_check: WaitCheck, health: Health, key: str) -> Check:
    """As ``wait_check``, but it also raises `GRACE` seconds after a notice that the hook has failed on another rank."""
    notices, since = health.notices, [0.0]
    notices.listen_for(key)

    def check() -> None:
        wait_check()
        text = notices.text_of(key)
        if text is not None:
            since[0] = since[0] or time.monotonic()
            if time.monotonic() - since[0] > GRACE:
                raise _Unanswered(
                    f"what it has sent here gets no answer, because it has failed on another rank: {text}"
                )

    return check


class _Unanswered(RuntimeError):
    pass


def _wait_for_event(event: threading.Event, check: Check) -> None:
    """Waits until another thread sets the event. ``check`` may raise meanwhile."""
    while not event.wait(SLICE):
        check()


def _wait_for_future(future: Future[Any], check: Check) -> None:
    """Waits until the future has a value or an error. ``check`` may raise meanwhile."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    _wait_for_event(done, check)


_Pauses = Iterator[None]
"""A generator that yields where it has to wait. The launcher's thread then runs other queues, and resumes it later."""


class RoundQueue:
    """The rounds of one purpose. ``name`` is equal on all ranks, and no other queue has it.

    Attributes:
        is_waiting: true while the queue waits for other ranks or for the issuing thread, not for a caller here.
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

        ``contents``: lines of text that are equal on all ranks. Whatever decides the number, order, sizes and dtypes of
        the round's items has to be in them.
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

        Their next round then raises `PeerFailed` with the text of ``error``. This returns at once. With ``until_all``
        every round raises until all ranks have called this, once for each failure: ranks may have begun different
        numbers of rounds when one fails.
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
