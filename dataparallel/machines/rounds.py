"""`Round`: what all ranks do together, for example one backward; and `Launched`, each thing in it that is waited for.

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

from dataparallel.machines.agreement import Steps, failures
from dataparallel.machines.collectives import Staged, Transfer
from dataparallel.machines.errors import MachinesError, again, in_words
from dataparallel.machines.health import SLICE, Check, Health, Watch

if TYPE_CHECKING:
    from dataparallel.machines.round_queue import RoundQueue

GRACE = 2.0
"""Seconds that a call has to end after it has failed on another rank."""


class Launched:
    """A future of something in a round, ``what`` in words."""

    def __init__(self, what: str, health: Health) -> None:
        self.what = what
        self._health = health
        self._decided = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """The result: of a collective its tensor, of what ranks say a list of it, of an end a list of bool.

        A tensor is ready for the calling thread's current stream.

        Raises:
            PeerGone: a rank is gone, or did not come within the group's timeout.
            PeerFailed: a rank has failed in this round.
            MachinesDiffer: the ranks have begun different rounds.
            Exception: what a collective or a call has raised on this rank.
        """
        self._health.check_process()
        with Watch(self._health, self.what) as watch:
            _wait_for_event(self._decided, watch)
            if self._error is not None:
                raise again(self._error)
            if isinstance(self._result, Transfer):
                # The result is taken once: a second wait gets the tensor.
                try:
                    self._result = self._result.wait(watch)
                except MachinesError:
                    raise
                except RuntimeError as error:
                    raise again(self._health.break_because(error, self.what)) from error
            return self._result

    @property
    def is_decided(self) -> bool:
        """True if it has been issued, or has failed."""
        return self._decided.is_set()

    def has_arrived(self) -> bool:
        """True if `received` does not block, as far as one can tell."""
        return self.is_decided and (not isinstance(self._result, Transfer) or self._result.has_arrived())

    def received(self) -> Staged:
        """What a collective has received, where it was received, for the issuing thread to send on."""
        if self._error is not None:
            raise again(self._error)
        transfer: Transfer = self._result
        return transfer.received()

    def succeed(self, result: Any) -> None:
        """It has been issued, or has its result."""
        self._result = result
        self._decided.set()

    def fail(self, error: BaseException) -> None:
        """It will not be issued, or has failed."""
        self._error = error
        self._decided.set()


@dataclass
class Item:
    """What a round has to do next.

    Attributes:
        kind: "collective": ``calls`` return a `Transfer` each, and are issued together. Those of a "call" are its
            beginning and its check; that of a "say" returns what this rank says. An "end" has ``used`` and ``failed``.
        launched: what the caller holds; for collectives one for each.
        after: what has to have arrived before.
    """

    kind: Literal["collective", "call", "say", "end", "close"]
    launched: Sequence[Launched]
    calls: Sequence[Callable[[], Any]] = ()
    after: Sequence[Launched] = ()
    used: Sequence[bool] = ()
    failed: str | None = None

    @property
    def what(self) -> str:
        """In words, for messages."""
        return self.launched[0].what

    def is_ready(self) -> bool:
        """True if this rank can do it."""
        return all(launched.has_arrived() for launched in self.after)


class Round:
    """What all ranks do together: see `RoundQueue.begin_round`.

    Attributes:
        failed: of a round that is here only to say that this rank has failed, the reason.
        until_all: of such a round: it says so until all ranks do.
        items: what is still to be done.
        error: why nothing more of the round is done.
        failed_call: why a call of the round has failed, here or on another rank.
    """

    def __init__(
        self, queue: RoundQueue, kind: str, contents: str, failed: str | None = None, until_all: bool = False
    ) -> None:
        self.kind, self.contents, self.failed, self.until_all = kind, contents, failed, until_all
        self.items: deque[Item] = deque()
        self.error: BaseException | None = None
        self.failed_call: BaseException | None = None
        self._queue = queue
        self._is_ended = failed is not None

    def launch(self, what: str, collective: Callable[[], Transfer], after: Sequence[Launched] = ()) -> Launched:
        """``collective`` is called by the issuing thread, when it is its turn: in the order of these calls.

        It has to issue the same on every rank, over the group of the queue or a part of it. If it raises, so does its
        wait, and the group is broken: what the other ranks have sent has no partner.

        Args:
            what: in words, for messages.
            collective: what to call.
            after: the collective sends on what these have received, so it is issued when that has arrived.

        Raises:
            RuntimeError: after `end`.
        """
        return self.launch_together([what], [collective], after)[0]

    def launch_together(
        self, what: Sequence[str], collectives: Sequence[Callable[[], Transfer]], after: Sequence[Launched] = ()
    ) -> list[Launched]:
        """As `launch`, for collectives of several devices that nothing comes between on any of them."""
        launched = [self._launched(each) for each in what]
        if launched:
            self._add(Item("collective", launched, collectives, after))
        return launched

    def call(self, what: str, begin: Callable[[], Future[Any]], check: Callable[[], object]) -> Launched:
        """As `launch`, but ``begin`` may send anything itself: a communication hook.

        The issuing thread calls it, waits for its future, and calls ``check``. Until then it issues nothing else, of
        other groups neither. If either raises on a rank, later calls of the round are not made, every rank's waits for
        calls raise, and the next round works, unless what was sent gets no answer: then the group is broken.
        """
        launched = self._launched(what)
        self._add(Item("call", [launched], [begin, check]))
        return launched

    def say(self, what: str, value: Callable[[], Any]) -> Launched:
        """The result: what each rank says, in their order; small. ``value`` is called by the launcher's thread."""
        launched = self._launched(what)
        self._add(Item("say", [launched], [value]))
        return launched

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> Launched:
        """The last of the round. Its result says for each entry of ``used`` if it is true on any rank.

        Args:
            used: as many entries on every rank; their number follows from ``contents``.
            error: why this rank has failed. Every rank's wait raises `PeerFailed` then. All that the other ranks launch
                in the round has to be launched here too, with zeros for example.
        """
        failed = None if error is None else f"in {self.kind!r}: {in_words(error)}"
        launched = self._launched("the end")
        self._add(Item("end", [launched], used=list(used), failed=failed))
        return launched

    def close(self) -> None:
        """The last of the round, without an exchange: no rank can fail in it."""
        self._add(Item("close", []))

    def _launched(self, what: str) -> Launched:
        return Launched(f"{what} of {self.kind!r}", self._queue.health)

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
        for launched in item.launched:
            launched.fail(error)


def make_call(queue: RoundQueue, round: Round, item: Item) -> None:
    """Makes a call that sends something itself, over a group that nobody here knows.

    If it fails on one rank, the others may wait for something that never comes. So this rank says that at once, beside
    what all ranks say after each call. A rank that still waits `GRACE` seconds after it has heard it will get no
    answer, and later collectives would be paired with what it has sent: the group is broken.
    """
    (launched,), (begin, check) = item.launched, item.calls
    if round.failed_call is None:
        queue.calls += 1
        key, failed = f"call {queue.calls} of {queue.name}", None
        with Watch(queue.health, item.what) as watch:
            try:
                _wait_for_future(begin(), _patience(watch, queue.health, key))
                check()
            except (MachinesError, _Unanswered):
                raise
            except Exception as error:
                failed = error
                launched.fail(error)
                queue.health.notices.say(key, in_words(error))
            steps = queue.connections.all(None if failed is None else f": {in_words(failed)}")
            said = _waited(steps, watch)
            round.failed_call = failed or failures(queue.group, said)
    if round.failed_call is None:
        launched.succeed(None)
    elif not launched.is_decided:
        launched.fail(round.failed_call)


def _waited(steps: Steps, check: Check) -> Any:
    value = None
    try:
        while True:
            future = steps.send(value)
            _wait_for_future(future, check)
            value = future.value()
    except StopIteration as end:
        return end.value


def _patience(watch: Watch, health: Health, key: str) -> Check:
    """The check of a wait for a call, which gives up some time after that has failed on another rank."""
    notices, since = health.notices, [0.0]
    notices.ask(key)

    def check() -> None:
        watch()
        heard = notices.heard(key)
        if heard is not None:
            since[0] = since[0] or time.monotonic()
            if time.monotonic() - since[0] > GRACE:
                raise _Unanswered(
                    f"what it has sent here gets no answer, because it has failed on another rank: {heard}"
                )

    return check


class _Unanswered(RuntimeError):
    pass


def _wait_for_event(event: threading.Event, check: Check) -> None:
    """Until another thread sets the event, or ``check`` raises."""
    while not event.wait(SLICE):
        check()


def _wait_for_future(future: Future[Any], check: Check) -> None:
    """Until the future has a value or an error, or ``check`` raises."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    _wait_for_event(done, check)
