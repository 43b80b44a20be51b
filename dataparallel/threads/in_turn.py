"""The tasks of one call, one after the other in the calling thread.

If one replica runs at a time, a worker thread costs a handover and a second set of intra-op threads, which slows the
caller's down even after the call.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from dataparallel.forks import in_forked_child
from dataparallel.profiling import Replicas
from dataparallel.threads import gang, pool
from dataparallel.threads.gang import Gang
from dataparallel.threads.pool import Outcome, Polls, Skipped, Turn

_IDLE_POLLS = 25  # after so many polls without a call the watcher sleeps until it is woken


class SerialTasks:
    """The tasks of one call. They are run once.

    If a task comes to a meeting, all that have not started are handed to a `Gang` of workers with one permit: the
    calling thread's task is one of its tasks, and they still take turns. Tasks that wait for each other by their own
    means would hang. So with ``stall_timeout`` a *watcher*, one thread for the process, looks at the call now and then,
    and hands over all that have not started. Then all may run at a time.

    Args:
        tasks: one callable without arguments for each slot, for the calling thread.
        for_workers: the same tasks for worker threads. Needed if tasks meet, or with ``stall_timeout``.
        stall_timeout, devices, watch: as in `Gang`.

    Attributes:
        stalled: true once ``stall_timeout`` has run out.

    A slot is taken from ``_waiting`` once: the calling thread takes one after the other and runs its task. The watcher
    takes all that are left and makes a gang of them, and so does the calling thread when its task steps aside. Both do
    so with ``_lock`` held, and the calling thread takes the lock before it looks for the gang.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        for_workers: Sequence[Callable[[], Any]] = (),
        stall_timeout: float | None = None,
        devices: Sequence[Hashable] | None = None,
        watch: Replicas | None = None,
    ) -> None:
        self._tasks, self._for_workers, self._stall_timeout = list(tasks), list(for_workers), stall_timeout
        self._devices: Sequence[Hashable] = [None] * len(self._tasks) if devices is None else devices
        self._watch = watch
        self.stalled = False
        self._outer = gang.current_gang()
        self._outcomes = [Outcome() for _ in self._tasks]
        self._waiting = deque(range(len(self._tasks)))
        self._lock = threading.Lock()
        self._handed_over: tuple[list[int], Gang] | None = None
        self._slot: int | None = None  # of the last task that the calling thread has begun
        self._polls = Polls(-1)  # of the watcher, which has not seen this call yet

    def run_tasks(self) -> list[Outcome]:
        """Runs the tasks and returns when all have ended.

        Once a task has failed, those that have not started are skipped. ``KeyboardInterrupt`` is the outcome of the
        task in which it comes. Tasks that workers run are waited for then; a second one is raised at once.
        """
        pool.note_use()
        try:
            if self._stall_timeout is not None:
                _watcher.add(self)
            self._run_here()
            self._collect()
            return self._outcomes
        except BaseException:
            for outcome in self._outcomes:
                outcome.clear()
            handed_over = self._close()
            if handed_over is not None:
                handed_over[1].leave(self._slot, failed=True)
                for outcome in handed_over[1].cancel_tasks():
                    outcome.clear()
            raise
        finally:
            self._outcomes, self._tasks, self._for_workers = [], [], []

    def _run_here(self) -> None:
        for slot in self._take_waiting():
            outcome, task, self._slot = self._outcomes[slot], self._tasks[slot], slot
            if self._outer is not None and self._outer.is_stopped:
                outcome.error = Skipped()
                continue
            if self._watch is not None:
                self._watch.admitted(slot)
            outcome.fill(task)
            if outcome.error is not None:
                for skipped in self._take_waiting():
                    self._outcomes[skipped].error = Skipped()

    def step_aside(self, slot: int, go_on: Sequence[int] = ()) -> Turn:
        """See `meetings.Turns`."""
        with self._lock:
            if self._handed_over is None:
                self._hand_over([*self._take_waiting()], permits=1, running=[slot])
        assert self._handed_over is not None
        step = partial(self._handed_over[1].step_aside, slot, go_on)
        return self._in_worker(step) if threading.current_thread() is threading.main_thread() else step()

    def let_go_on(self, slots: Sequence[int]) -> None:
        """See `meetings.Turns`."""
        if self._handed_over is not None:
            self._handed_over[1].let_go_on(slots)

    def _in_worker(self, step: Callable[[], Turn | None]) -> Any:
        """Has a worker do this ``step`` of the gang. Ctrl-C, which comes in the main thread, cannot leave it half done.

        If it comes meanwhile, the step may be done later, or never if there is no worker for it yet.
        """
        outcome, done = Outcome(), Turn()

        def job(worker: pool.Worker) -> None:
            outcome.fill(step)
            pool.release(worker)
            done.give()

        pool.start(job, self._devices[0])
        while not done.wait(pool.POLL_SECONDS):
            pass
        try:
            if outcome.error is not None:
                raise outcome.error
            return outcome.value
        finally:
            outcome.clear()

    def _take_waiting(self) -> Iterator[int]:
        """Slots that have not started. Each is taken by one thread only."""
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return

    def _collect(self) -> None:
        handed_over = self._close()
        if handed_over is None:
            return
        slots, gang = handed_over
        own = self._slot
        failed = own is not None and self._outcomes[own].error is not None
        interrupted = any(isinstance(outcome.error, KeyboardInterrupt) for outcome in self._outcomes)
        try:
            self._in_worker(partial(gang.leave, own, failed))
        except RuntimeError:  # no worker for it
            gang.leave(own, failed)
        outcomes = gang.cancel_tasks() if interrupted else gang.finish_tasks()
        for slot in slots:
            self._outcomes[slot] = outcomes[slot]

    def _close(self) -> tuple[list[int], Gang] | None:
        """The slots that were handed over, and their gang. From here on none is handed over."""
        with self._lock:
            self._waiting.clear()
        return self._handed_over

    def poll(self) -> None:
        """The watcher does this every `pool.POLL_SECONDS` seconds."""
        left = len(self._waiting)
        idle = self._polls.seconds(left, waits=left > 0)
        if self._stall_timeout is not None and idle >= self._stall_timeout:
            with self._lock:
                slots, outcomes = [*self._take_waiting()], self._outcomes
                if not slots or not outcomes:  # the call is over, perhaps by a second Ctrl-C
                    return
                try:
                    self._hand_over(slots, permits=len(self._tasks))
                    self.stalled = True
                except BaseException as error:  # no more threads, for example: the calling thread has to see it
                    for slot in slots:
                        outcomes[slot].error = error

    def _hand_over(self, slots: list[int], permits: int, running: Sequence[int] = ()) -> None:
        """Makes a gang of the tasks of these slots, which have not started. Called with the lock held.

        ``running``: the slot whose task the calling thread runs, if its permit is one of the gang's.
        """
        # Without a stall the order is fixed. So a task that waits for a nested call lets no other one start.
        groups = [0] * len(self._tasks) if running else None
        gang = Gang(self._for_workers, permits, groups, devices=self._devices, outer=self._outer, watch=self._watch)
        gang.join(slots, running)
        self._handed_over = slots, gang  # before a worker may start, because Ctrl-C may come right after that
        try:
            gang.begin_tasks()
        except RuntimeError:  # the system has no more threads
            self._handed_over = None
            raise


class _Watcher:
    """The thread that polls calls, and the calls, as long as they exist."""

    def __init__(self) -> None:
        self._calls: set[weakref.ref[SerialTasks]] = set()
        self._wake = threading.Event()
        self._is_asleep = True
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, call: SerialTasks) -> None:
        self._calls.add(weakref.ref(call, self._calls.discard))
        if self._is_asleep:  # read only after the call was added, which the watcher checks before it sleeps
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._poll_calls, name="dataparallel-watch", daemon=True)
                    thread.start()
                    self._thread = thread
            self._wake.set()

    def _poll_calls(self) -> None:
        while True:
            self._is_asleep = False
            idle_polls = 0
            while idle_polls < _IDLE_POLLS:
                idle_polls = 0 if self._calls else idle_polls + 1
                for reference in [*self._calls]:
                    call = reference()
                    if call is not None:
                        call.poll()
                    del call  # otherwise the last one would live until the next poll
                time.sleep(pool.POLL_SECONDS)
            self._is_asleep = True
            if not self._calls:  # read only after `add` can see that the watcher sleeps
                self._wake.wait()
            self._wake.clear()


_watcher = _Watcher()


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A forked child has no watcher thread."""
    global _watcher
    _watcher = _Watcher()
