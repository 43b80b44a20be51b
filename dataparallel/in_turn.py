"""Tasks of one call, one after the other in the calling thread.

Where one replica runs at a time, a thread of its own brings it nothing and costs something: the hand-over, and a second
set of intra-op threads beside the caller's, which slow each other down even after the call. What a task means, and
when tasks run so, is ``parallel_apply``'s business.

Tasks that wait for each other by means of their own would hang in this order. So with ``patience`` a thread of the
process looks at such calls now and then, and hands tasks that have not started over to ``workers``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dataparallel import workers
from dataparallel.workers import Gang, Outcome, Skipped

__all__ = ["InTurn"]

_LOOKS_AT_NOTHING = 25  # after as many the looking thread sleeps until it is woken


class InTurn:
    """The tasks of one call. `run` is called once.

    Args:
        tasks: one callable without arguments for each slot, for the calling thread.
        elsewhere: the same for threads of workers, for all of them at once; needed with ``patience``.
        patience: seconds without a task ending after which workers run those that have not started; ``None``: never.

    Attributes:
        stalled: whether the patience ran out.

    Who takes a slot from ``_waiting`` runs it. Who takes the token from ``_may_hand_over`` says whether a gang takes
    over: the looking thread, or the calling one at the end. Taking is one step, which succeeds for one of them.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        elsewhere: Sequence[Callable[[], Any]] = (),
        patience: float | None = None,
    ) -> None:
        self._tasks, self._elsewhere, self._patience = list(tasks), list(elsewhere), patience
        self.stalled = False
        self._outcomes = [Outcome() for _ in self._tasks]
        self._waiting = deque(range(len(self._tasks)))
        self._may_hand_over = deque([True])
        self._is_closed = patience is None  # from here on nothing is handed over
        self._rest: tuple[list[int], Gang] | None = None
        self._looks, self._seen = 0, len(self._waiting)  # of the looking thread

    def run(self) -> list[Outcome]:
        """Runs the tasks and returns when none is running any more.

        Once a task has failed, those that have not started are skipped. ``KeyboardInterrupt`` is the outcome of the
        task in which it comes; tasks that workers run then end after the operator that they are in.
        """
        workers.note_use()
        try:
            if not self._is_closed:
                _watch.add(self)
            self._run_here()
            self._collect(cancel=False)
            return self._outcomes
        except BaseException:
            # An error refers to frames, and one of them to the outcomes: nobody else will break the circle.
            for outcome in self._outcomes:
                outcome.value = outcome.error = None
            self._collect(cancel=True)
            raise
        finally:
            self._outcomes, self._tasks, self._elsewhere = [], [], []

    def _run_here(self) -> None:
        for slot in self._taken():
            outcome, task = self._outcomes[slot], self._tasks[slot]
            try:
                outcome.value = task()
            except BaseException as error:
                # From here on the traceback begins in the task.
                outcome.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                for skipped in self._taken():
                    self._outcomes[skipped].error = Skipped()
                self._collect(cancel=not isinstance(error, Exception))

    def _taken(self) -> Iterator[int]:
        """Slots that have not started, each for the thread that gets it."""
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return

    def _collect(self, cancel: bool) -> None:
        """Waits for what has been handed over; afterwards nothing is."""
        if self._is_closed:
            return
        if not _take(self._may_hand_over):
            while self._rest is None:  # it is being made
                time.sleep(0.001)
            slots, gang = self._rest
            # One that has been interrupted while it was waited for has no outcomes any more.
            for slot, outcome in zip(slots, gang.cancel() if cancel else gang.finish(), strict=False):
                self._outcomes[slot] = outcome
        self._is_closed = True

    def look(self) -> None:
        """Called by the looking thread every `dataparallel.workers.LOOK_UP` seconds."""
        waiting = len(self._waiting)
        # Looks are counted, not seconds: those in which the whole process was stopped say nothing.
        self._looks = self._looks + 1 if waiting and waiting == self._seen else 0
        self._seen = waiting
        if self._patience is not None and self._looks * workers.LOOK_UP >= self._patience:
            self._hand_over()

    def _hand_over(self) -> None:
        tasks = self._elsewhere
        if not tasks or not _take(self._may_hand_over):
            return
        slots = [*self._taken()]
        try:
            gang = Gang([tasks[slot] for slot in slots], max(1, len(slots)))
            gang.begin()
            self.stalled = bool(slots)
        except BaseException as error:  # no more threads, for example: whoever waits has to hear of it
            for slot in slots:
                self._outcomes[slot].error = error
            slots, gang = [], Gang([], 1)
        self._rest = slots, gang


def _take(token: deque[bool]) -> bool:
    try:
        return token.pop()
    except IndexError:
        return False


class _Watch:
    """The looking thread, and the calls that it looks at until they are gone."""

    def __init__(self) -> None:
        self._calls: set[weakref.ref[InTurn]] = set()
        self._wake = threading.Event()
        self._is_asleep = True
        self._not_started = deque([True])

    def add(self, call: InTurn) -> None:
        self._calls.add(weakref.ref(call, self._calls.discard))
        if self._is_asleep:  # read after the call is there to be seen
            if _take(self._not_started):
                threading.Thread(target=self._look, name="dataparallel-watch", daemon=True).start()
            self._wake.set()

    def _look(self) -> None:
        while True:
            self._is_asleep = False
            looks_at_nothing = 0
            while looks_at_nothing < _LOOKS_AT_NOTHING:
                looks_at_nothing = 0 if self._calls else looks_at_nothing + 1
                for reference in [*self._calls]:
                    call = reference()
                    if call is not None:
                        call.look()
                    del call  # or the last one would live on until the next look
                time.sleep(workers.LOOK_UP)
            self._is_asleep = True
            if not self._calls:  # looked at after it says that it is asleep
                self._wake.wait()
            self._wake.clear()


_watch = _Watch()


def _start_afresh_after_fork() -> None:
    """A forked child has no looking thread."""
    global _watch
    _watch = _Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
