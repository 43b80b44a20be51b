"""Tasks of one call, one after the other in the calling thread.

Where one replica runs at a time, a thread of its own brings it nothing and costs something: the hand-over, and a second
set of intra-op threads beside the caller's, which slow each other down even after the call. The calling thread meets
every device so, with the handles that libraries keep for each pair of both. What a task means, and when tasks run so,
is ``parallel_apply``'s business.

Tasks that wait for each other by means of their own would hang in this order. So with ``patience`` a thread of the
process looks at such calls now and then, and hands tasks that have not started over to ``workers``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from dataparallel.forks import in_forked_child
from dataparallel.threads import gang, pool
from dataparallel.threads.gang import Gang, Outcome, Skipped

__all__ = ["InTurn"]

_LOOKS_AT_NOTHING = 25  # after as many the looking thread sleeps until it is woken


class InTurn:
    """The tasks of one call. `run` is called once.

    Args:
        tasks: one callable without arguments for each slot, for the calling thread.
        elsewhere: the same for threads of workers, for all of them at once; needed with ``patience``.
        patience: seconds without a task ending after which workers run those that have not started; ``None``: never.
        homes: of the tasks elsewhere, as in `Gang`.

    Attributes:
        stalled: whether the patience ran out.

    Who takes a slot from ``_waiting`` runs it: the calling thread one after the other, or the looking thread all that
    are left, for a gang. It makes that with ``_lock`` held, so that the calling thread can wait for it.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        elsewhere: Sequence[Callable[[], Any]] = (),
        patience: float | None = None,
        homes: Sequence[Hashable] | None = None,
    ) -> None:
        self._tasks, self._elsewhere, self._patience = list(tasks), list(elsewhere), patience
        self._homes: Sequence[Hashable] = [None] * len(self._tasks) if homes is None else homes
        self.stalled = False
        self._outer = gang.gang_around()
        self._outcomes = [Outcome() for _ in self._tasks]
        self._waiting = deque(range(len(self._tasks)))
        self._lock = threading.Lock()
        self._rest: tuple[list[int], Gang] | None = None  # what has been
        self._looks, self._seen = 0, -1  # of the looking thread, which has seen nothing yet

    def run(self) -> list[Outcome]:
        """Runs the tasks and returns when none is running any more.

        Once a task has failed, those that have not started are skipped. ``KeyboardInterrupt`` is the outcome of the
        task in which it comes; what workers run is waited for then, until a second one is raised at once.
        """
        pool.note_use()
        try:
            if self._patience is not None:
                _watch.add(self)
            self._run_here()
            self._collect()
            return self._outcomes
        except BaseException:
            for outcome in self._outcomes:
                outcome.forget()
            rest = self._close()
            for outcome in [] if rest is None else rest[1].cancel():
                outcome.forget()
            raise
        finally:
            self._outcomes, self._tasks, self._elsewhere = [], [], []

    def _run_here(self) -> None:
        for slot in self._taken():
            outcome, task = self._outcomes[slot], self._tasks[slot]
            if self._outer is not None and self._outer.is_stopped:
                outcome.error = Skipped()
                continue
            try:
                outcome.value = task()
            except BaseException as error:
                # From here on the traceback begins in the task.
                outcome.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                for skipped in self._taken():
                    self._outcomes[skipped].error = Skipped()

    def _taken(self) -> Iterator[int]:
        """Slots that have not started, each for the thread that gets it."""
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return

    def _collect(self) -> None:
        """Waits for what has been handed over."""
        rest = self._close()
        if rest is None:
            return
        slots, gang = rest
        interrupted = any(isinstance(outcome.error, KeyboardInterrupt) for outcome in self._outcomes)
        for slot, outcome in zip(slots, gang.cancel() if interrupted else gang.finish(), strict=True):
            self._outcomes[slot] = outcome

    def _close(self) -> tuple[list[int], Gang] | None:
        """What has been handed over; from here on nothing is."""
        if self._patience is not None:
            with self._lock:
                self._waiting.clear()
        return self._rest

    def look(self) -> None:
        """Called by the looking thread every `dataparallel.threads.gang.LOOK_UP` seconds."""
        waiting = len(self._waiting)
        # Looks are counted, not seconds: those in which the whole process was stopped say nothing.
        self._looks = self._looks + 1 if waiting and waiting == self._seen else 0
        self._seen = waiting
        if self._patience is not None and self._looks * gang.LOOK_UP >= self._patience:
            with self._lock:
                self._hand_over()

    def _hand_over(self) -> None:
        outcomes, tasks = self._outcomes, self._elsewhere
        slots = [*self._taken()]
        if not slots or not outcomes:  # the call is over, perhaps by a second Ctrl-C
            return
        try:
            homes = [self._homes[slot] for slot in slots]
            gang = Gang([tasks[slot] for slot in slots], len(slots), homes=homes, outer=self._outer)
            gang.begin()
        except BaseException as error:  # no more threads, for example: whoever waits has to hear of it
            for slot in slots:
                outcomes[slot].error = error
        else:
            self._rest, self.stalled = (slots, gang), True


class _Watch:
    """The looking thread, and the calls that it looks at until they are gone."""

    def __init__(self) -> None:
        self._calls: set[weakref.ref[InTurn]] = set()
        self._wake = threading.Event()
        self._is_asleep = True
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, call: InTurn) -> None:
        self._calls.add(weakref.ref(call, self._calls.discard))
        if self._is_asleep:  # read after the call is there to be seen
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._look, name="dataparallel-watch", daemon=True)
                    thread.start()
                    self._thread = thread
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
                time.sleep(gang.LOOK_UP)
            self._is_asleep = True
            if not self._calls:  # looked at after it says that it is asleep
                self._wake.wait()
            self._wake.clear()


_watch = _Watch()


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A forked child has no looking thread."""
    global _watch
    _watch = _Watch()
