"""`Gang` runs the tasks of one call in kept threads (``pool``). Nested and concurrent calls have gangs of their own.

At most ``permits`` tasks of a gang run Python at a time, and they start in slot order. Tasks of one *group* never run
at the same time. If one replica runs at a time, workers would only cost a handover and a second set of intra-op
threads: `SerialTasks` runs the tasks in the calling thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from dataparallel.forks import in_forked_child
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.threads import pool
from dataparallel.threads.pool import Outcome, Skipped, Turn


class _CurrentTask(threading.local):
    gang: Gang | None = None
    slot: int = -1


_current = _CurrentTask()


def current_gang() -> Gang | None:
    return _current.gang


class Gang:
    """The tasks of one call, and the state of running them. They are run once. Who waits for whom:

    - A task waits for a permit, and for the tasks of its group. The worker that ends a task starts the next ones.
    - A task that waits for a nested gang is *paused*: it gives its permit back, but its group stays busy.
    - A task that waits for other tasks of its gang (``meetings``) is *parked*: it gives its permit back, and its group
      is free. Unparked tasks go on in slot order when they have a permit, one of each group at a time.
    - So no worker waits for a worker that waits for it. Only tasks that wait for each other by their own means can need
      more permits than there are. If no task ends during ``stall_timeout``, the gang goes on without permits.

    A task with the group ``None`` has no group. ``devices``: for each slot the device, or another key, whose threads
    run the task. ``outer_gang``: the one whose task the waiting thread runs.

    A task is in ``_waiting``, then in ``_running``. While it waits for a nested call it is in ``_paused``, and while it
    waits for other tasks in ``_parked``. Afterwards it is in ``_ready`` until it has a permit again, and, if it was
    parked, until its group is free. The gang is over when no task is in any of these fields.

    Ctrl-C may come in the waiting thread between any two steps. So only workers write these fields, with ``_lock``
    held. The waiting thread sets flags, and starts a worker that reads them. It takes the lock itself only after the
    first Ctrl-C. The second Ctrl-C abandons the gang in whatever state it is.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        permits: int,
        groups: Sequence[Hashable | None] | None = None,
        stall_timeout: float | None = None,
        devices: Sequence[Hashable] | None = None,
        outer_gang: Gang | None = None,
    ) -> None:
        if permits < 1:
            raise ValueError(f"a gang needs at least 1 permit; got {permits}")
        self._tasks: list[Callable[[], Any] | None] = list(tasks)
        self._groups: Sequence[Hashable | None] = [None] * len(self._tasks) if groups is None else groups
        self._devices: Sequence[Hashable] = [None] * len(self._tasks) if devices is None else devices
        self._permits = permits
        self._stall_timeout = stall_timeout
        self._outer_gang = current_gang() if outer_gang is None else outer_gang
        self.stalled = False  # true once ``stall_timeout`` has run out
        self._outcomes = [Outcome() for _ in self._tasks]
        self._lock = threading.Lock()
        self._waiting = list(range(len(self._tasks)))
        self._running: set[int] = set()
        self._paused: set[int] = set()
        self._parked: dict[int, Turn] = {}
        self._ready: dict[int, Turn] = {}
        self._progress = 0  # how many times a task has ended or begun to wait
        self._is_interrupted = False
        self._has_caller = False  # the calling thread runs tasks itself
        self._ended_in_caller: set[int] = set()
        self._has_failed = False
        self._is_over = False
        self._end = Turn()  # the thread that called `run_tasks` waits for it

    @property
    def is_stopped(self) -> bool:
        """True if no further task starts, because Ctrl-C ends this call or a call around it."""
        return self._is_interrupted or (self._outer_gang is not None and self._outer_gang.is_stopped)

    def run_tasks(self) -> list[Outcome]:
        """Runs the tasks and returns when all have ended.

        Once a task has failed, tasks of higher slots that have not started are skipped. After an exception in the
        waiting thread (``KeyboardInterrupt``) no further task starts, in nested gangs neither. The exception is raised
        when the running tasks have ended. A second one is raised at once and abandons them. Only a second one ends a
        call in which a running task waits by its own means for a task that has not started.
        """
        return self._run([self._start_worker, self._wait])

    def finish_tasks(self) -> list[Outcome]:
        """Waits for tasks whose first worker has started, in place of `run_tasks`."""
        return self._run([self._wait])

    def cancel_tasks(self) -> list[Outcome]:
        """`finish_tasks` after a Ctrl-C: the first one still waits for running tasks, a second one does not."""
        return [] if self._is_interrupted else self._run([self._stop, self._wait])

    def _run(self, steps: Sequence[Callable[[], None]]) -> list[Outcome]:
        # The caller may be a task inside compiled code, and the tasks of this gang may have to compile code.
        return compile_lock.run_aside(self._run_steps, steps) if self._tasks else []

    def _run_steps(self, steps: Sequence[Callable[[], None]]) -> list[Outcome]:
        outer, slot = _current.gang, _current.slot
        if outer is not None:
            outer._pause(slot)
        try:
            for step in steps:
                step()
        except BaseException:
            is_second, self._is_interrupted = self._is_interrupted, True
            if not is_second:
                self._stop()
                self._wait()
                for outcome in self._take_outcomes():
                    outcome.clear()
            raise
        finally:
            if outer is not None:
                outer._resume(slot)
        return self._take_outcomes()

    def _take_outcomes(self) -> list[Outcome]:
        """Empties the gang: a worker may refer to it for a moment longer, and must not keep the call's memory."""
        outcomes, self._outcomes, self._tasks = self._outcomes, [], []
        return outcomes

    def _start_worker(self) -> None:
        """Starts a worker on the first waiting task's device. It runs the tasks that may start, if any."""
        pool.start(partial(self._run_in_worker, None), self._devices[next(iter(self._waiting), 0)])

    def _wait(self) -> None:
        polls, progress = 0, self._progress
        while not self._is_over:
            # Python handles a signal that arrives just before this wait only after the wait, so the wait is short.
            self._end.wait(pool.POLL_SECONDS)
            if self._stall_timeout is None or self.stalled:
                continue
            # Polls are counted instead of seconds, because time in which the whole process was stopped must not count.
            # Nor must time in which a thread compiles.
            is_stalled = bool(self._waiting or self._ready) and progress == self._progress and not compile_lock.is_taken
            polls, progress = polls + 1 if is_stalled else 0, self._progress
            if polls * pool.POLL_SECONDS >= self._stall_timeout:
                self.stalled = True
                self._start_worker()

    def _stop(self) -> None:
        """Skips tasks that have not started, and unparks all. Nested gangs do so at their next change."""
        self._is_interrupted = True
        with self._lock:
            self._give_permits()
            self._wake_if_over()

    def _run_in_worker(self, slot: int | None, worker: pool.Worker) -> None:
        """Runs tasks as long as some may start, of other devices too: a handover to another thread costs a switch."""
        slots = self._next_slots(None, worker) if slot is None else [slot]
        while slots:
            self._start_workers(slots[1:])
            self._run_task(slots[0])
            slots = self._next_slots(slots[0], worker)

    def _next_slots(self, ended: int | None, worker: pool.Worker) -> list[int]:
        """Notes that a task has ended and returns the slots that may start now. If there are none, frees the worker."""
        with self._lock:
            if ended is not None:
                self._note_ended(ended)
            slots = self._give_permits()
            if not slots:
                # The worker is released first, so that the thread that waits for this gang finds it idle afterwards.
                pool.release(worker)
                self._wake_if_over()
            return slots

    def _give_permits(self) -> list[int]:
        """Gives permits to tasks, lowest slot first. Wakes tasks that wait, returns slots to start. Needs the lock."""
        if self.is_stopped:
            self._skip_waiting(above=-1)
        if self.is_stopped or self._has_failed:
            self._make_ready([*self._parked])  # a task that they wait for will never come
        slots = []
        permits = math.inf if self.stalled else self._permits
        busy = {self._groups[slot] for slot in itertools.chain(self._running, self._paused)} - {None}
        for slot in sorted(itertools.chain(self._waiting, self._ready)):
            if len(self._running) >= permits:
                break
            if slot not in self._paused:
                if self._groups[slot] in busy:
                    continue
                busy |= {self._groups[slot]} - {None}
            self._paused.discard(slot)
            self._running.add(slot)
            turn = self._ready.pop(slot, None)
            if turn is not None:
                turn.give()
            else:
                self._waiting.remove(slot)
                slots.append(slot)
        return slots

    def _start_workers(self, slots: list[int]) -> None:
        slots = [*slots]
        while slots:
            slot = slots.pop(0)
            try:
                pool.start(partial(self._run_in_worker, slot), self._devices[slot])
            except Exception as error:  # the system has no more threads, for example
                self._outcomes[slot].error = error
                with self._lock:
                    self._note_ended(slot)
                    slots += self._give_permits()  # the permit of the slot is free again
                    self._wake_if_over()

    def _run_task(self, slot: int) -> None:
        outcome, task = self._outcomes[slot], self._tasks[slot]
        assert task is not None
        _current.gang, _current.slot = self, slot
        outcome.fill(task)
        _current.gang = None

    def _note_ended(self, slot: int) -> None:
        """Needs the lock."""
        self._progress += 1
        for waits in (self._parked, self._ready):  # the slot is in one of them if Ctrl-C has ended its wait
            waits.pop(slot, None)
        for slots in (self._running, self._paused):
            slots.discard(slot)
        self._tasks[slot] = None
        if self._outcomes[slot].error is not None:
            self._has_failed = True
            self._skip_waiting(above=slot)

    def _skip_waiting(self, above: int) -> None:
        for slot in [slot for slot in self._waiting if slot > above]:
            self._waiting.remove(slot)
            self._outcomes[slot].error = Skipped()

    def _wake_if_over(self) -> None:
        """Needs the lock."""
        states = (self._waiting, self._running, self._paused, self._parked, self._ready)
        if not (self._is_over or self._has_caller or any(states)):
            self._is_over = True
            self._end.give()

    def _pause(self, slot: int) -> None:
        """Gives back the permit of ``slot``, whose task begins to wait for a nested gang. Its group stays busy."""
        with self._lock:
            self._progress += 1
            self._running.discard(slot)
            self._paused.add(slot)
            slots = self._give_permits()
        self._start_workers(slots)

    def _resume(self, slot: int) -> None:
        turn = Turn()
        with self._lock:
            self._ready[slot] = turn
            slots = self._give_permits()
        self._start_workers(slots)
        turn.wait()

    def park(self, slot: int, unpark: Sequence[int] = ()) -> Turn:
        """Gives back the permit of ``slot`` and lets its group run. The slot's thread calls this, and then waits.

        Slots in ``unpark``, which may contain ``slot``, are unparked. The `Turn` is given when ``slot`` may go on.
        """
        turn = Turn()
        with self._lock:
            self._progress += 1
            self._running.discard(slot)
            if slot in self._ended_in_caller:  # Ctrl-C has ended the task while a worker was about to park it
                turn.give()
                return turn
            self._parked[slot] = turn
            self._make_ready(unpark)
            slots = self._give_permits()
        self._start_workers(slots)
        return turn

    def unpark(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._make_ready(slots)
            starting = self._give_permits()
        self._start_workers(starting)

    def _make_ready(self, parked: Sequence[int]) -> None:
        for slot in parked:
            if slot in self._parked:
                self._ready[slot] = self._parked.pop(slot)

    def add_caller(self, waiting: Sequence[int], running: Sequence[int]) -> None:
        """The calling thread runs the tasks of ``running``. The gang is not over before it calls `remove_caller`."""
        self._waiting, self._has_caller = [*waiting], True
        self._running.update(running)

    def remove_caller(self, slot: int, failed: bool) -> None:
        """Notes that the calling thread's last task has ended, the one of ``slot``."""
        with self._lock:
            self._has_caller = False
            if slot not in self._ended_in_caller:
                self._ended_in_caller.add(slot)
                if failed:
                    self._outcomes[slot].error = Skipped()
                self._note_ended(slot)
            slots = self._give_permits()
            self._wake_if_over()
        self._start_workers(slots)


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A child that is forked inside a task does not run that task."""
    global _current
    _current = _CurrentTask()


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
        self._gang: Gang | None = None  # has the tasks above the caller's, once they are handed over
        self._caller_slot = -1  # the slot of the last task that the calling thread has begun

    def run_tasks(self) -> list[Outcome]:
        """Runs the tasks and returns when all have ended.

        Once a task has failed, tasks that have not started are skipped. ``KeyboardInterrupt`` is the outcome of the
        task that it interrupts, and the call still waits for tasks in workers. A second one is raised at once.
        """
        pool.note_use()
        try:
            self._run_in_caller()
            if self._gang is not None:
                self._finish_handed_over(self._gang)
            return self._outcomes
        except BaseException:
            for outcome in self._outcomes:
                outcome.clear()
            if self._gang is not None:
                self._gang.remove_caller(self._caller_slot, failed=True)
                for outcome in self._gang.cancel_tasks():
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
        park = partial((self._gang or self._hand_over()).park, slot, unpark)
        return self._step_in_worker(park) if threading.current_thread() is threading.main_thread() else park()

    def unpark(self, slots: Sequence[int]) -> None:
        if self._gang is not None:
            self._gang.unpark(slots)

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
        while self._waiting:
            yield self._waiting.popleft()

    def _finish_handed_over(self, gang: Gang) -> None:
        caller_slot, outcome = self._caller_slot, self._outcomes[self._caller_slot]
        try:
            self._step_in_worker(partial(gang.remove_caller, caller_slot, outcome.error is not None))
        except RuntimeError:  # the system has no thread for a worker
            gang.remove_caller(caller_slot, outcome.error is not None)
        outcomes = gang.cancel_tasks() if isinstance(outcome.error, KeyboardInterrupt) else gang.finish_tasks()
        self._outcomes[caller_slot + 1 :] = outcomes[caller_slot + 1 :]

    def _hand_over(self) -> Gang:
        """In one group the order of tasks is fixed: none starts while another runs a nested call."""
        waiting, groups = [*self._take_waiting()], [0] * len(self._tasks)
        gang = Gang(self._worker_tasks, 1, groups, None, self._devices, self._outer_gang)
        gang.add_caller(waiting, [self._caller_slot])
        self._gang = gang  # before a worker may start, because Ctrl-C may come right after the start
        try:
            gang._start_worker()
        except RuntimeError:  # the system has no more threads
            self._gang = None
            raise
        return gang
