"""`SerialTasks` runs the tasks of one call one after the other in the calling thread.

If one replica runs at a time, worker threads would only cost: each needs a handover, and a second set of intra-op
threads, which slows the caller's intra-op threads down even after the call.
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
from dataparallel.threads import pool
from dataparallel.threads.gang import Gang, current_gang
from dataparallel.threads.pool import Outcome, Skipped, StallClock, Turn

_IDLE_POLLS = 25  # after so many polls without a call the watcher sleeps until it is woken


class SerialTasks:
    """The tasks of one call, and the state of running them. They are run once.

    If a task comes to a meeting, the tasks that have not started are handed to a `Gang` of workers with one permit. The
    caller's slot becomes one of the gang's slots, so the tasks still take turns. Tasks that wait for each other by
    their own means would hang. So with ``stall_timeout`` a *watcher*, one thread for the process, polls the call. When
    the call stalls, the watcher hands over the tasks that have not started, to a gang with a permit for each.

    Args:
        tasks: one callable without arguments for each slot, for the calling thread.
        worker_tasks: the same tasks for worker threads. Needed if tasks meet, or with ``stall_timeout``.
        stall_timeout, devices, recorder: as in `Gang`.

    Attributes:
        stalled: true once ``stall_timeout`` has run out.

    Each slot is taken from ``_waiting`` once: by the calling thread, which runs its task, or for a gang, with all slots
    that are left. The watcher and the calling thread hold ``_lock`` while they make a gang, and the calling thread
    takes the lock before it looks for a gang.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        worker_tasks: Sequence[Callable[[], Any]] = (),
        stall_timeout: float | None = None,
        devices: Sequence[Hashable] | None = None,
        recorder: Replicas | None = None,
    ) -> None:
        self._tasks, self._worker_tasks, self._stall_timeout = list(tasks), list(worker_tasks), stall_timeout
        self._devices: Sequence[Hashable] = [None] * len(self._tasks) if devices is None else devices
        self._recorder = recorder
        self.stalled = False
        self._outer_gang = current_gang()
        self._outcomes = [Outcome() for _ in self._tasks]
        self._waiting = deque(range(len(self._tasks)))
        self._lock = threading.Lock()
        self._handed_over: tuple[list[int], Gang] | None = None
        self._caller_slot: int | None = None  # the slot of the last task that the calling thread has begun
        self._clock = StallClock(-1)  # of the watcher, which has not seen this call yet

    def run_tasks(self) -> list[Outcome]:
        """Runs the tasks and returns when all have ended.

        Once a task has failed, tasks that have not started are skipped. ``KeyboardInterrupt`` is the outcome of the
        task that it interrupts, and the call still waits for tasks in workers. A second one is raised at once.
        """
        pool.note_use()
        try:
            if self._stall_timeout is not None:
                _watcher.add(self)
            self._run_in_caller()
            self._finish_handed_over()
            return self._outcomes
        except BaseException:
            for outcome in self._outcomes:
                outcome.clear()
            handed_over = self._stop_handing_over()
            if handed_over is not None:
                handed_over[1].remove_caller(self._caller_slot, failed=True)
                for outcome in handed_over[1].cancel_tasks():
                    outcome.clear()
            raise
        finally:
            self._outcomes, self._tasks, self._worker_tasks = [], [], []

    def _run_in_caller(self) -> None:
        for slot in self._take_waiting():
            outcome, task, self._caller_slot = self._outcomes[slot], self._tasks[slot], slot
            if self._outer_gang is not None and self._outer_gang.is_stopped:
                outcome.error = Skipped()
                continue
            if self._recorder is not None:
                self._recorder.admitted(slot)
            outcome.fill(task)
            if outcome.error is not None:
                for skipped in self._take_waiting():
                    self._outcomes[skipped].error = Skipped()

    def park(self, slot: int, unpark: Sequence[int] = ()) -> Turn:
        """See `meetings.Scheduler`."""
        with self._lock:
            if self._handed_over is None:
                self._hand_over([*self._take_waiting()], permits=1, running=[slot])
        assert self._handed_over is not None
        park = partial(self._handed_over[1].park, slot, unpark)
        return self._step_in_worker(park) if threading.current_thread() is threading.main_thread() else park()

    def unpark(self, slots: Sequence[int]) -> None:
        """See `meetings.Scheduler`."""
        if self._handed_over is not None:
            self._handed_over[1].unpark(slots)

    def _step_in_worker(self, step: Callable[[], Turn | None]) -> Any:
        """Runs a ``step`` of the gang in a worker, because Ctrl-C in the main thread could leave the step half done.

        If Ctrl-C comes meanwhile, the step may run later, or never if it has no worker yet.
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
        """Yields slots that have not started, each to one thread only."""
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return

    def _finish_handed_over(self) -> None:
        handed_over = self._stop_handing_over()
        if handed_over is None:
            return
        slots, gang = handed_over
        caller_slot = self._caller_slot
        failed = caller_slot is not None and self._outcomes[caller_slot].error is not None
        interrupted = any(isinstance(outcome.error, KeyboardInterrupt) for outcome in self._outcomes)
        try:
            self._step_in_worker(partial(gang.remove_caller, caller_slot, failed))
        except RuntimeError:  # the system has no thread for a worker
            gang.remove_caller(caller_slot, failed)
        outcomes = gang.cancel_tasks() if interrupted else gang.finish_tasks()
        for slot in slots:
            self._outcomes[slot] = outcomes[slot]

    def _stop_handing_over(self) -> tuple[list[int], Gang] | None:
        """From here on no slot is handed over. Returns the slots that were, and their gang."""
        with self._lock:
            self._waiting.clear()
        return self._handed_over

    def poll(self) -> None:
        """The watcher calls this every `pool.POLL_SECONDS` seconds."""
        waiting = len(self._waiting)
        seconds = self._clock.poll(waiting, is_anyone_waiting=waiting > 0)
        if self._stall_timeout is not None and seconds >= self._stall_timeout:
            with self._lock:
                slots, outcomes = [*self._take_waiting()], self._outcomes
                if not slots or not outcomes:  # the call is over, perhaps by a second Ctrl-C
                    return
                try:
                    self._hand_over(slots, permits=len(self._tasks))
                    self.stalled = True
                except BaseException as error:  # for example no more threads: the calling thread has to raise this
                    for slot in slots:
                        outcomes[slot].error = error

    def _hand_over(self, slots: list[int], permits: int, running: Sequence[int] = ()) -> None:
        """Makes a gang of the tasks of ``slots``, which have not started. Called with the lock held.

        ``running``: the slot whose task the calling thread runs, if this task counts among those with a permit.
        """
        # Without a stall the order of tasks is fixed: in one group no task starts while another runs a nested call.
        groups = [0] * len(self._tasks) if running else None
        gang = Gang(self._worker_tasks, permits, groups, None, self._devices, self._outer_gang, self._recorder)
        gang.add_caller(slots, running)
        self._handed_over = slots, gang  # before a worker may start, because Ctrl-C may come right after the start
        try:
            gang.begin_tasks()
        except RuntimeError:  # the system has no more threads
            self._handed_over = None
            raise


class _Watcher:
    """Polls all calls with a ``stall_timeout``, in one thread. Its weak references keep no call alive."""

    def __init__(self) -> None:
        self._calls: set[weakref.ref[SerialTasks]] = set()
        self._wake = threading.Event()
        self._is_asleep = True
        self._lock = threading.Lock()  # guards the thread, and that a sleeping one is woken
        self._thread: threading.Thread | None = None

    def add(self, call: SerialTasks) -> None:
        with self._lock:
            self._calls.add(weakref.ref(call, self._calls.discard))
            if not self._is_asleep:
                return
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
                    del call  # otherwise the last call would live until the next poll
                time.sleep(pool.POLL_SECONDS)
            with self._lock:
                self._is_asleep = not self._calls
            if self._is_asleep:
                self._wake.wait()
            self._wake.clear()


_watcher = _Watcher()


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A forked child has no watcher thread."""
    global _watcher
    _watcher = _Watcher()
