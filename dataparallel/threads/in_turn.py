"""`SerialTasks` runs the tasks of one call one after the other in the calling thread.

If one replica runs at a time, worker threads would only cost: each needs a handover, and a second set of intra-op
threads, which slows the caller's intra-op threads down even after the call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from dataparallel.threads import pool
from dataparallel.threads.gang import Gang, current_gang
from dataparallel.threads.pool import Outcome, Skipped, Turn


class SerialTasks:
    """The tasks of one call, and the state of running them. They are run once.

    If a task comes to a meeting, the tasks that have not started are handed to a `Gang` of workers with one permit. The
    caller's slot becomes one of the gang's slots, so the tasks still take turns.

    ``worker_tasks`` are the same tasks for worker threads, if tasks meet. ``devices``: as in `Gang`.

    The calling thread alone takes slots from ``_waiting`` and makes the gang.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        worker_tasks: Sequence[Callable[[], Any]] = (),
        devices: Sequence[Hashable] | None = None,
    ) -> None:
        self._tasks, self._worker_tasks = list(tasks), list(worker_tasks)
        self._devices: Sequence[Hashable] = [None] * len(self._tasks) if devices is None else devices
        self._outer_gang = current_gang()
        self._outcomes = [Outcome() for _ in self._tasks]
        self._waiting = deque(range(len(self._tasks)))
        self._handed_over: tuple[list[int], Gang] | None = None
        self._caller_slot: int | None = None  # the slot of the last task that the calling thread has begun

    def run_tasks(self) -> list[Outcome]:
        """Runs the tasks and returns when all have ended.

        Once a task has failed, tasks that have not started are skipped. ``KeyboardInterrupt`` is the outcome of the
        task that it interrupts, and the call still waits for tasks in workers. A second one is raised at once.
        """
        pool.note_use()
        try:
            self._run_in_caller()
            self._finish_handed_over()
            return self._outcomes
        except BaseException:
            for outcome in self._outcomes:
                outcome.clear()
            handed_over = self._handed_over
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
            outcome.fill(task)
            if outcome.error is not None:
                for skipped in self._take_waiting():
                    self._outcomes[skipped].error = Skipped()

    def park(self, slot: int, unpark: Sequence[int] = ()) -> Turn:
        """See `meetings.Scheduler`."""
        if self._handed_over is None:
            self._hand_over([*self._take_waiting()], slot)
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
        """Yields slots that have not started."""
        while self._waiting:
            yield self._waiting.popleft()

    def _finish_handed_over(self) -> None:
        handed_over = self._handed_over
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

    def _hand_over(self, slots: list[int], running: int) -> None:
        """Makes a gang of the tasks of ``slots``, which have not started. The calling thread runs that of ``running``.

        In one group the order of tasks is fixed: none starts while another runs a nested call.
        """
        groups = [0] * len(self._tasks)
        gang = Gang(self._worker_tasks, 1, groups, None, self._devices, self._outer_gang)
        gang.add_caller(slots, [running])
        self._handed_over = slots, gang  # before a worker may start, because Ctrl-C may come right after the start
        try:
            gang.begin_tasks()
        except RuntimeError:  # the system has no more threads
            self._handed_over = None
            raise
