"""Gangs: the tasks of one call, run by kept threads.

A *gang* is the tasks of one call. At most ``permits`` of them run Python at a time, started in slot order; tasks with
the same *turn* never run at the same time. A task that waits for a nested call gives its permit back meanwhile, so
that another task of its gang can start, and takes one again before it goes on; it keeps its turn. Nested and concurrent
calls have gangs and permits of their own, so none waits for a worker that waits for it. Tasks that wait for each other
by means of their own may need more permits than there are: a gang with ``patience`` then goes on without permits.

A task is anything callable; what it means is ``parallel_apply``'s business. Threads come from ``pool``: a task that
starts beside others runs in a thread of its *home*. A thread that ends a task runs the next one itself, for another
home too, because handing it to another thread costs a switch. So with as many permits as tasks no thread leaves its
home, and with fewer a home meets at most as many threads of a gang as there are permits.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from dataparallel.forks import in_forked_child
from dataparallel.threads import pool
from dataparallel.threads.pool import Worker

__all__ = ["LOOK_UP", "Gang", "Outcome", "Skipped", "gang_around"]


LOOK_UP = 0.2
"""Seconds between two looks of a thread that waits for a gang."""


class Skipped(Exception):
    """The outcome of a task that was not started, as an earlier slot had failed or Ctrl-C was pressed.

    It is only a consequence, never an original error.
    """


class Outcome:
    """What became of one task: ``value``, or ``error`` if that is not ``None``."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def forget(self) -> None:
        """For a call that raises. An error refers to frames, and one of them to the outcome: only this ends that."""
        self.value = self.error = None


class _Here(threading.local):
    """Which task the current thread is inside of."""

    gang: Gang | None = None
    slot: int = -1


_here = _Here()


def gang_around() -> Gang | None:
    """The gang of which the calling thread runs a task."""
    return _here.gang


class Gang:
    """The tasks of one call and the state of running them. `run` is called once.

    Args:
        tasks: one callable without arguments for each slot.
        permits: how many may run Python at a time, at least 1.
        turns: a key for each slot; of tasks with one key only one runs at a time. ``None`` excludes nothing.
        patience: seconds without a task ending after which those that wait for a permit need none; ``None``: for ever.
        homes: a key for each slot: its task had best run in a thread that was made for this key, such as its device.
        outer: the gang of which the waiting thread runs a task; default: that of the thread that makes this one.

    Attributes:
        stalled: whether the patience ran out.

    A task is in ``_waiting``, then in ``_running``; while it waits for a nested call it is in ``_paused``, and then in
    ``_resuming`` until it has a permit again. The gang is over when no task is in any of them.

    Ctrl-C may come in the waiting thread between any two steps. So workers write these fields, with ``_lock`` held. The
    waiting thread sets flags for what it wants, and sees to it that a worker comes by. It takes the lock itself only
    after the first Ctrl-C: the second one leaves the gang to itself, in whatever state.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        permits: int,
        turns: Sequence[Hashable | None] | None = None,
        patience: float | None = None,
        homes: Sequence[Hashable] | None = None,
        outer: Gang | None = None,
    ) -> None:
        if permits < 1:
            raise ValueError(f"a gang needs at least 1 permit; got {permits}")
        self._tasks: list[Callable[[], Any] | None] = list(tasks)
        self._turns: Sequence[Hashable | None] = [None] * len(self._tasks) if turns is None else turns
        self._homes: Sequence[Hashable] = [None] * len(self._tasks) if homes is None else homes
        self._permits = permits
        self._patience = patience
        self._outer = _here.gang if outer is None else outer
        self.stalled = False
        self._outcomes = [Outcome() for _ in self._tasks]
        self._lock = threading.Lock()
        self._waiting = list(range(len(self._tasks)))
        self._running: set[int] = set()
        self._paused: set[int] = set()
        self._resuming: dict[int, threading.Event] = {}
        self._steps = 0  # how often a task has ended or begun to wait for a nested call
        self._stopped = False
        self._is_over = False
        # A lock, not an event: Ctrl-C inside of ``Event.wait`` can become a RuntimeError of Python's own.
        self._over = threading.Lock()
        self._over.acquire()

    @property
    def is_stopped(self) -> bool:
        """Whether no further task starts, because Ctrl-C ends this call or one that it is part of."""
        return self._stopped or (self._outer is not None and self._outer.is_stopped)

    def run(self) -> list[Outcome]:
        """Runs the tasks and returns when none is running any more.

        Once a task has failed, tasks of higher slots that have not started are skipped. After an exception in the
        waiting thread (``KeyboardInterrupt``) no further task starts, in nested gangs neither, and it is raised when
        those that run have ended. A second one is raised at once, and leaves their threads to themselves. Tasks that
        wait for others that have not started need the second one.
        """
        return self._run([self._send_worker, self._wait])

    def begin(self) -> None:
        """The first half of `run`, from any thread: returns at once. `finish` or `cancel` has to follow.

        Raises:
            RuntimeError: the system has no thread for it.
        """
        if self._tasks:
            self._send_worker()

    def finish(self) -> list[Outcome]:
        """The second half of `run`."""
        return self._run([self._wait])

    def cancel(self) -> list[Outcome]:
        """`finish` after a Ctrl-C that came elsewhere: as the first one in `run`, or at once if that came before."""
        return [] if self._stopped else self._run([self._stop, self._wait])

    def _run(self, steps: Sequence[Callable[[], None]]) -> list[Outcome]:
        if not self._tasks:
            return []
        outer, slot = _here.gang, _here.slot
        if outer is not None:
            outer._pause(slot)
        try:
            self._go_through(steps)
        finally:
            if outer is not None:
                outer._resume(slot)
        return self._let_go()

    def _go_through(self, steps: Sequence[Callable[[], None]]) -> None:
        try:
            for step in steps:
                step()
        except BaseException:
            is_second, self._stopped = self._stopped, True
            if not is_second:
                self._stop()
                self._wait()
                for outcome in self._let_go():
                    outcome.forget()
            raise

    def _let_go(self) -> list[Outcome]:
        """The outcomes. A thread may still have the gang in its hands for a moment, but nothing of the call."""
        outcomes, self._outcomes, self._tasks = self._outcomes, [], []
        return outcomes

    def _send_worker(self) -> None:
        """Has a thread come by that runs tasks if some may start, best one of the first task's home."""
        first = (self._waiting[:1] or [0])[0]
        pool.start(partial(self._work, None), self._homes[first])

    def _wait(self) -> None:
        steps, looks = self._steps, 0
        while not self._is_over:
            # A signal that arrives just before the wait is noticed only after it: look up now and then.
            self._over.acquire(timeout=LOOK_UP)
            if self._patience is None or self.stalled:
                continue
            # Looks are counted, not seconds: those in which the whole process was stopped say nothing.
            looks = looks + 1 if self._steps == steps and (self._waiting or self._resuming) else 0
            steps = self._steps
            if looks * LOOK_UP >= self._patience:
                self.stalled = True
                self._send_worker()

    def _stop(self) -> None:
        """Starts no further task. Those of nested gangs see it when the next of them ends."""
        self._stopped = True
        with self._lock:
            self._skip(above=-1)
            self._note_end()

    def _work(self, slot: int | None, worker: Worker) -> None:
        """Called by a worker: runs the task of ``slot``, then others as permits become free.

        ``None``: begins with one that may start, if there is any.
        """
        slots = self._next(None, worker) if slot is None else [slot]
        while slots:
            self._start(slots[1:])
            self._call(slots[0])
            slots = self._next(slots[0], worker)

    def _next(self, ended: int | None, worker: Worker) -> list[int]:
        """Notes that a task has ended; returns those for the worker to start. Without any it is idle again."""
        with self._lock:
            if ended is not None:
                self._settle(ended)
            slots = self._admit()
            if not slots:
                # To the pool first: whoever waits for this gang finds the thread idle in its next call.
                pool.take_back(worker)
                self._note_end()
            return slots

    def _admit(self) -> list[int]:
        """Gives free permits to tasks, lowest slot first; returns those that need a thread. With the lock held."""
        if self.is_stopped:
            self._skip(above=-1)
        slots = []
        permits = math.inf if self.stalled else self._permits
        held = {self._turns[slot] for slot in itertools.chain(self._running, self._paused, self._resuming)}
        for slot in sorted(itertools.chain(self._waiting, self._resuming)):
            if len(self._running) >= permits:
                break
            if slot in self._resuming:
                self._running.add(slot)
                self._resuming.pop(slot).set()
            elif self._turns[slot] is None or self._turns[slot] not in held:
                held.add(self._turns[slot])
                self._waiting.remove(slot)
                self._running.add(slot)
                slots.append(slot)
        return slots

    def _start(self, slots: list[int]) -> None:
        """Has each of ``slots`` run by a thread of its own."""
        for slot in slots:
            try:
                pool.start(partial(self._work, slot), self._homes[slot])
            except Exception as error:  # the system has no more threads, for example
                self._outcomes[slot].error = error
                with self._lock:
                    self._settle(slot)

    def _call(self, slot: int) -> None:
        outcome, task = self._outcomes[slot], self._tasks[slot]
        assert task is not None
        _here.gang, _here.slot = self, slot
        try:
            outcome.value = task()
        except BaseException as error:
            # From here on the traceback begins in the task.
            outcome.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        _here.gang = None

    def _settle(self, slot: int) -> None:
        """Notes that a task has ended. With the lock held."""
        self._steps += 1
        self._running.discard(slot)
        self._tasks[slot] = None
        if self._outcomes[slot].error is not None:
            self._skip(above=slot)

    def _skip(self, above: int) -> None:
        for slot in [slot for slot in self._waiting if slot > above]:
            self._waiting.remove(slot)
            self._outcomes[slot].error = Skipped()

    def _note_end(self) -> None:
        """Wakes the waiting thread once no task is left. With the lock held."""
        if not (self._is_over or self._waiting or self._running or self._paused or self._resuming):
            self._is_over = True
            self._over.release()

    def _pause(self, slot: int) -> None:
        """Gives the permit of ``slot`` back, because its task begins to wait for a nested gang; it keeps its turn."""
        with self._lock:
            self._steps += 1
            self._running.discard(slot)
            self._paused.add(slot)
            slots = self._admit()
        self._start(slots)

    def _resume(self, slot: int) -> None:
        """Waits for a permit for ``slot`` again."""
        admitted = threading.Event()
        with self._lock:
            self._paused.discard(slot)
            self._resuming[slot] = admitted
            slots = self._admit()
        self._start(slots)
        admitted.wait()


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A child that is forked inside a task is not inside of it."""
    global _here
    _here = _Here()
