"""`Round`: the collectives that all ranks issue together, in one backward for example. `PendingResult`: one's future.

A round begins with a text that has to be equal on all ranks (`RoundQueue.begin_round`), has collectives in one order,
and an end. Its methods may be called by any thread and return at once. Every failure ends every wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.futures import Future

from dataparallel.machines.agreement import Steps, error_of_failures
from dataparallel.machines.collectives import Staged, Transfer
from dataparallel.machines.errors import MachinesError, copy_error, describe_error
from dataparallel.machines.health import SLICE, Check, Health, WaitCheck

if TYPE_CHECKING:
    from dataparallel.machines.round_queue import RoundQueue

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

        A tensor is ready for the calling thread's current stream.

        Raises:
            PeerGone: a rank is gone, or did not come within the group's timeout.
            PeerFailed: a rank has failed in this round.
            MachinesDiffer: the ranks have begun different rounds.
            Exception: what a collective or a communication hook has raised on this rank.
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
        wait for its result raises too, and the group is broken: the messages of the other ranks have no partner.

        Args:
            what: the name of the collective in messages.
            collective: issues the collective.
            after: results whose tensors the collective sends on. It is issued when they have arrived.

        Raises:
            RuntimeError: after `end`.
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

        Args:
            used: as many entries on every rank; their number follows from ``contents``.
            error: why this rank has failed. Every rank's wait raises `PeerFailed` then. This rank still has to launch
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
