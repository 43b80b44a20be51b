"""A *gang*: the tasks of one call, run by kept threads (``pool``). Nested and concurrent calls have gangs of their own.

At most ``permits`` tasks of a gang run Python at a time, and they start in slot order. Tasks of one *group* never run
at the same time.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from dataparallel.forks import in_forked_child
from dataparallel.profiling import Replicas
from dataparallel.replicas.compiled.gate import gate
from dataparallel.threads import pool
from dataparallel.threads.pool import Outcome, Polls, Skipped, Turn


class _CurrentTask(threading.local):
    """The task that the current thread runs."""

    gang: Gang | None = None
    slot: int = -1


_current = _CurrentTask()


def current_gang() -> Gang | None:
    """The gang whose task this thread runs."""
    return _current.gang


class Gang:
    """The tasks of one call and the state of running them. They are run once. Who waits for whom:

    - A task waits for a permit, and for the tasks of its group. The worker that ends a task starts the next ones.
    - A task that runs a nested gang waits for it, without a permit meanwhile but still in its group.
    - A task that waits for others of its gang (``meetings``) steps aside: it has no permit, and its group is free. When
      the others have come, all go on in slot order, one of each group at a time.
    - So no worker waits for a worker that waits for it. Only tasks that wait for each other by their own means can need
      more permits than there are. If no task ends during ``stall_timeout``, the gang goes on without permits.

    Args:
        tasks: one callable without arguments for each slot.
        permits: how many tasks may run Python at a time, at least 1.
        groups: for each slot its group's key; a task with ``None`` has no group.
        stall_timeout: in seconds; ``None``: never.
        devices: for each slot the device, or another key, whose threads run the task.
        outer: the gang whose task the waiting thread runs. Default: that of the thread that makes this gang.
        watch: is told when a task gets its permit, if anybody records that.

    A task is in ``_waiting``, then in ``_running``. While it waits for a nested call it is in ``_paused``, then in
    ``_resuming`` until it has a permit again. One that waits for other tasks is in ``_aside``, then in ``_returning``
    until it has a permit and its group is free. The gang is over when no task is in any of them.

    Ctrl-C may come in the waiting thread between any two steps. So only workers write these fields, with ``_lock``
    held. The waiting thread sets flags, and starts a worker that reads them. It takes the lock itself only after the
    first Ctrl-C; the second one abandons the gang in whatever state it is.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        permits: int,
        groups: Sequence[Hashable | None] | None = None,
        stall_timeout: float | None = None,
        devices: Sequence[Hashable] | None = None,
        outer: Gang | None = None,
        watch: Replicas | None = None,
    ) -> None:
        if permits < 1:
            raise ValueError(f"a gang needs at least 1 permit; got {permits}")
        self._tasks: list[Callable[[], Any] | None] = list(tasks)
        self._groups: Sequence[Hashable | None] = [None] * len(self._tasks) if groups is None else groups
        self._devices: Sequence[Hashable] = [None] * len(self._tasks) if devices is None else devices
        self._permits = permits
        self._stall_timeout = stall_timeout
        self._outer = current_gang() if outer is None else outer
        self._watch = watch
        self.stalled = False  # ``stall_timeout`` has run out
        self._outcomes = [Outcome() for _ in self._tasks]
        self._lock = threading.Lock()
        self._waiting = list(range(len(self._tasks)))
        self._running: set[int] = set()
        self._paused: set[int] = set()
        self._resuming: dict[int, Turn] = {}
        self._aside: dict[int, Turn] = {}
        self._returning: dict[int, Turn] = {}
        self._steps = 0  # how many times a task has ended or begun to wait
        self._stopped = False
        self._is_joined = False  # the calling thread runs a task itself
        self._left: set[int] = set()  # what it has run
        self._has_failed = False
        self._is_over = False
        self._over = Turn()  # of the thread that waits

    @property
    def is_stopped(self) -> bool:
        """True if no further task starts, because Ctrl-C ends this call or a call around it."""
        return self._stopped or (self._outer is not None and self._outer.is_stopped)

    def run_tasks(self) -> list[Outcome]:
        """Runs the tasks and returns when all have ended.

        Once a task has failed, tasks of higher slots that have not started are skipped. After an exception in the
        waiting thread (``KeyboardInterrupt``) no further task starts, in nested gangs neither, and it is raised when
        the running tasks have ended. A second one is raised at once, and abandons them: only that ends a call in which
        a running task waits by its own means for one that has not started.
        """
        return self._run([self._send_worker, self._wait])

    def begin_tasks(self) -> None:
        """The first half of `run_tasks`, in any thread. Raises ``RuntimeError`` if the system has no thread for it."""
        if self._tasks:
            self._send_worker()

    def finish_tasks(self) -> list[Outcome]:
        """The second half of `run_tasks`, in the thread that waits."""
        return self._run([self._wait])

    def cancel_tasks(self) -> list[Outcome]:
        """`finish_tasks` as after a Ctrl-C: the first waits for running tasks, the second does not."""
        return [] if self._stopped else self._run([self._stop, self._wait])

    def _run(self, steps: Sequence[Callable[[], None]]) -> list[Outcome]:
        # A task of an outer gang may be inside compiled code, which its own tasks may have to compile.
        return gate.run_aside(self._run_steps, steps) if self._tasks else []

    def _run_steps(self, steps: Sequence[Callable[[], None]]) -> list[Outcome]:
        outer, slot = _current.gang, _current.slot
        if outer is not None:
            outer._pause(slot)
        try:
            for step in steps:
                step()
        except BaseException:
            is_second, self._stopped = self._stopped, True
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
        """A worker may refer to the gang for a moment longer, but the gang holds nothing of the call."""
        outcomes, self._outcomes, self._tasks = self._outcomes, [], []
        return outcomes

    def _send_worker(self) -> None:
        """Starts a thread, one of the first task's device, that runs the tasks that may start, if any."""
        pool.start(partial(self._work, None), self._devices[next(iter(self._waiting), 0)])

    def _wait(self) -> None:
        polls = Polls(self._steps)
        while not self._is_over:
            # Python handles a signal that arrives just before this wait only after it, so the wait is short.
            self._over.wait(pool.POLL_SECONDS)
            if self._stall_timeout is None or self.stalled:
                continue
            is_anyone_waiting = bool(self._waiting or self._resuming or self._returning)
            if polls.seconds(self._steps, is_anyone_waiting) >= self._stall_timeout:
                self.stalled = True
                self._send_worker()

    def _stop(self) -> None:
        """Skips tasks that have not started, and wakes those that wait for others. Nested gangs do so a step later."""
        self._stopped = True
        with self._lock:
            self._admit()
            self._wake_if_over()

    def _work(self, slot: int | None, worker: pool.Worker) -> None:
        """In a worker: runs the task of ``slot``, or else any that may start, then others as long as some may start.

        Also those of other devices: a handover to another thread costs a switch.
        """
        slots = self._next(None, worker) if slot is None else [slot]
        while slots:
            self._start(slots[1:])
            self._call(slots[0])
            slots = self._next(slots[0], worker)

    def _next(self, ended: int | None, worker: pool.Worker) -> list[int]:
        """Returns the tasks that the worker starts after one has ended, or releases it if there are none."""
        with self._lock:
            if ended is not None:
                self._note_ended(ended)
            slots = self._admit()
            if not slots:
                # The pool first: the thread that waits for this gang then finds the worker idle in its next call.
                pool.release(worker)
                self._wake_if_over()
            return slots

    def _admit(self) -> list[int]:
        """Gives permits to tasks, lowest slot first: wakes resumed ones and returns new ones. Needs the lock."""
        if self.is_stopped:
            self._skip(above=-1)
        if self.is_stopped or self._has_failed:
            self._let_return([*self._aside])  # somebody does not come any more
        slots = []
        permits = math.inf if self.stalled else self._permits
        busy = {self._groups[slot] for slot in itertools.chain(self._running, self._paused, self._resuming)} - {None}
        for slot in sorted(itertools.chain(self._waiting, self._resuming, self._returning)):
            if len(self._running) >= permits:
                break
            if slot not in self._resuming:
                if self._groups[slot] in busy:
                    continue
                busy |= {self._groups[slot]} - {None}
            self._running.add(slot)
            if self._watch is not None:
                self._watch.admitted(slot)
            turn = self._resuming.pop(slot, None) or self._returning.pop(slot, None)
            if turn is not None:
                turn.give()
            else:
                self._waiting.remove(slot)
                slots.append(slot)
        return slots

    def _start(self, slots: list[int]) -> None:
        slots = [*slots]
        while slots:
            slot = slots.pop(0)
            try:
                pool.start(partial(self._work, slot), self._devices[slot])
            except Exception as error:  # the system has no more threads, for example
                self._outcomes[slot].error = error
                with self._lock:
                    self._note_ended(slot)
                    slots += self._admit()  # those that wait for it go on
                    self._wake_if_over()

    def _call(self, slot: int) -> None:
        outcome, task = self._outcomes[slot], self._tasks[slot]
        assert task is not None
        _current.gang, _current.slot = self, slot
        outcome.fill(task)
        _current.gang = None

    def _note_ended(self, slot: int) -> None:
        """Needs the lock."""
        self._steps += 1
        for state in (self._aside, self._returning):  # Ctrl-C has ended its wait
            state.pop(slot, None)
        self._running.discard(slot)
        self._tasks[slot] = None
        if self._outcomes[slot].error is not None:
            self._has_failed = True
            self._skip(above=slot)

    def _skip(self, above: int) -> None:
        for slot in [slot for slot in self._waiting if slot > above]:
            self._waiting.remove(slot)
            self._outcomes[slot].error = Skipped()

    def _wake_if_over(self) -> None:
        """Needs the lock."""
        states = (self._waiting, self._running, self._paused, self._resuming, self._aside, self._returning)
        if not (self._is_over or self._is_joined or any(states)):
            self._is_over = True
            self._over.give()

    def _pause(self, slot: int) -> None:
        """Gives back the permit of ``slot``, whose task begins to wait for a nested gang. Its group stays busy."""
        with self._lock:
            self._steps += 1
            self._running.discard(slot)
            self._paused.add(slot)
            slots = self._admit()
        self._start(slots)

    def _resume(self, slot: int) -> None:
        turn = Turn()
        with self._lock:
            self._paused.discard(slot)
            self._resuming[slot] = turn
            if self._watch is not None:
                self._watch.waits(slot)
            slots = self._admit()
        self._start(slots)
        turn.wait()

    def step_aside(self, slot: int, go_on: Sequence[int] = ()) -> Turn:
        """See `meetings.Turns`."""
        turn = Turn()
        with self._lock:
            self._steps += 1
            self._running.discard(slot)
            if slot in self._left:  # Ctrl-C has ended it meanwhile, in the calling thread
                turn.give()
                return turn
            self._aside[slot] = turn
            if self._watch is not None:
                self._watch.waits(slot)
            self._let_return(go_on)
            slots = self._admit()
        self._start(slots)
        return turn

    def let_go_on(self, slots: Sequence[int]) -> None:
        """See `meetings.Turns`."""
        with self._lock:
            self._let_return(slots)
            starting = self._admit()
        self._start(starting)

    def _let_return(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._aside:
                self._returning[slot] = self._aside.pop(slot)

    def join(self, waiting: Sequence[int], running: Sequence[int]) -> None:
        """The calling thread runs ``running`` itself. The gang is not over before it calls `leave`."""
        self._waiting, self._is_joined = [*waiting], True
        self._running.update(running)

    def leave(self, slot: int | None, failed: bool) -> None:
        """The calling thread's last task, that of ``slot``, has ended. ``None``: it ran none."""
        with self._lock:
            self._is_joined = False
            if slot is not None and slot not in self._left:
                self._left.add(slot)
                if failed:
                    self._outcomes[slot].error = Skipped()
                self._note_ended(slot)
            slots = self._admit()
            self._wake_if_over()
        self._start(slots)


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A child that is forked inside a task does not run that task."""
    global _current
    _current = _CurrentTask()
