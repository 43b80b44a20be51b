"""Threads that run replicas: gangs, permits, wake-ups.

A *gang* is the tasks of one call. At most ``permits`` of them run Python at a time, started in slot order; tasks with
the same *turn* never run at the same time. A task that waits for a nested call gives its permit back meanwhile, so
that another task of its gang can start, and takes one again before it goes on; it keeps its turn. Nested and concurrent
calls have gangs and permits of their own, so none waits for a worker that waits for it. Tasks that wait for each other
by means of their own may need more permits than there are: a gang with ``patience`` then goes on without permits.

Threads are kept between calls and belong to the process: a gang takes idle ones, and more are made when there are
none, so a gang never waits for threads. A task is anything callable; what it means is ``parallel_apply``'s business.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from dataparallel import _torch

__all__ = ["LOOK_UP", "Gang", "Interrupted", "Outcome", "Skipped", "note_use"]


LOOK_UP = 0.2
"""Seconds between two looks of a thread that waits for a gang."""

_LIFT = -1  # in the place of a slot


class Interrupted(BaseException):
    """Raised inside a task when its call was interrupted; only a consequence, never an original error."""


class Skipped(Exception):
    """The outcome of a task that was not started because an earlier slot had failed; never an original error."""


class Outcome:
    """What became of one task: ``value``, or ``error`` if that is not ``None``."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None


class _Here(threading.local):
    """Which task the current thread is inside of."""

    gang: Gang | None = None
    slot: int = -1


_here = _Here()


class Gang:
    """The tasks of one call and the state of running them. `run` is called once.

    Args:
        tasks: one callable without arguments for each slot.
        permits: how many may run Python at a time, at least 1.
        turns: a key for each slot; of tasks with one key only one runs at a time. ``None`` excludes nothing.
        patience: seconds without a task ending after which those that wait for a permit need none; ``None``: for ever.

    Attributes:
        stalled: whether the patience ran out.

    A task is in ``_waiting``, then in ``_running``; while it waits for a nested call it is in ``_paused``, and then in
    ``_resuming`` until it has a permit again. Only workers write these fields, with ``_lock`` held.

    Interrupts come from outside at any bytecode: ``KeyboardInterrupt`` in the waiting thread, which therefore holds no
    lock and does no bookkeeping, and `Interrupted` in workers, which the waiting thread sends them. Both sides settle
    what happens by taking something away, which is one step and succeeds for one of them: the ``_launch`` token, before
    the gang has started, and a task's entry in ``_inside``, without which no worker is interrupted.
    """

    def __init__(
        self,
        tasks: Sequence[Callable[[], Any]],
        permits: int,
        turns: Sequence[Hashable | None] | None = None,
        patience: float | None = None,
    ) -> None:
        if permits < 1:
            raise ValueError(f"a gang needs at least 1 permit; got {permits}")
        self._tasks: list[Callable[[], Any] | None] = list(tasks)
        self._turns: list[Hashable | None] = [None] * len(self._tasks) if turns is None else list(turns)
        self._permits: float = permits
        self._patience = patience
        self.stalled = False
        self._outcomes = [Outcome() for _ in self._tasks]
        self._lock = threading.Lock()
        self._waiting = list(range(len(self._tasks)))
        self._running: set[int] = set()
        self._paused: dict[int, Gang] = {}
        self._resuming: dict[int, threading.Event] = {}
        self._steps = 0  # how often a task has ended or begun to wait for a nested call
        self._workers = 1  # threads that work for this gang; the first is the one that `run` asks for
        self._launch = [True]
        self._inside: dict[int, int] = {}  # slot -> ident of the thread that may be interrupted
        self._sent: set[int] = set()  # slots whose thread has been sent `Interrupted`
        self._interrupted = self._abandoned = False
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> list[Outcome]:
        """Runs the tasks and returns when none is running any more.

        Once a task has failed, tasks of higher slots that have not started are skipped. An exception in the waiting
        thread (``KeyboardInterrupt``) makes running tasks end after the operator that they are in, and is raised when
        they have; a second one abandons their threads and is raised at once. As Ctrl-C does on one device, it can
        interrupt a task at any place in its Python.
        """
        return self._run([self._begin, self._wait])

    def begin(self) -> None:
        """The first half of `run`, from any thread: returns at once. `finish` or `cancel` has to follow.

        Raises:
            RuntimeError: the system has no thread for it.
        """
        if self._tasks:
            self._begin()

    def finish(self) -> list[Outcome]:
        """The second half of `run`."""
        return self._run([self._wait])

    def cancel(self) -> list[Outcome]:
        """`finish` for a call that was interrupted elsewhere: running tasks end after the operator that they are in."""
        return self._run([self._interrupt, self._wait])

    def _run(self, steps: Sequence[Callable[[], None]]) -> list[Outcome]:
        if not self._tasks:
            return []
        outer, slot = _here.gang, _here.slot
        try:
            if outer is None:
                self._go_through(steps)
            else:
                outer._pause(slot, self)
                try:
                    self._go_through(steps)
                finally:
                    outer._resume(slot)
            return self._outcomes
        except BaseException:
            if not self._abandoned:
                # An error refers to the frame of `_call`, and that to the outcome: nobody else will break the circle.
                for outcome in self._outcomes:
                    outcome.value = outcome.error = None
            raise
        finally:
            if not self._abandoned:
                # A thread may still have the gang in its hands for a moment, but nothing of the call.
                self._outcomes, self._tasks = [], []

    def _begin(self) -> None:
        _pool.start(self, None)

    def _go_through(self, steps: Sequence[Callable[[], None]]) -> None:
        try:
            for step in steps:
                step()
        except BaseException:
            try:
                self._interrupt()
                self._wait()
            except BaseException:
                self._abandon()
                raise
            raise

    def _wait(self) -> None:
        steps, looks = self._steps, 0
        while not self._is_done:
            # A signal that arrives just before the wait is noticed only after it: look up now and then.
            self._done.acquire(timeout=LOOK_UP)
            if self._patience is None or self.stalled:
                continue
            # Looks are counted, not seconds: those in which the whole process was stopped say nothing.
            looks = looks + 1 if self._steps == steps and (self._waiting or self._resuming) else 0
            steps = self._steps
            if looks * LOOK_UP >= self._patience:
                self.stalled = True
                _pool.start(self, _LIFT)  # a worker does it: this thread may be interrupted, and takes no lock

    def _interrupt(self) -> None:
        """Starts no further task, and sends `Interrupted` to the threads of those that run. Holds no lock."""
        self._interrupted = True
        if self._take(self._launch.pop):
            self._is_done = True  # no worker will ever start
        for slot in list(self._inside):
            ident = self._inside.pop(slot, None)
            if ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupted))
                self._sent.add(slot)
        for nested in list(self._paused.values()):
            nested._interrupt()

    def _abandon(self) -> None:
        """Leaves the threads to themselves, those of nested gangs too."""
        self._interrupted = self._abandoned = True
        for nested in list(self._paused.values()):
            nested._abandon()

    @staticmethod
    def _take(pop: Callable[[], bool]) -> bool:
        try:
            return pop()
        except IndexError:
            return False

    def work(self, slot: int | None, worker: _Worker) -> bool:
        """Called by a worker: runs the task of ``slot`` (``None``: the first), then others as permits become free.

        For `_LIFT` it takes the limit away first.

        Returns whether the thread is in the pool again; one that may have been interrupted is not used any more.
        """
        if slot is None and not self._take(self._launch.pop):
            _pool.take_back(worker)
            return True
        if slot == _LIFT and not self._lift():
            _pool.take_back(worker)
            return True
        slots = self._admit() if slot is None or slot == _LIFT else [slot]
        while slots:
            self._start(slots[1:])
            self._call(slots[0])
            self._settle(slots[0])
            slots = self._admit()
        # Back to the pool first: whoever waits for this gang finds the thread idle in its next call.
        usable = not self._interrupted
        if usable:
            _pool.take_back(worker)
        self._leave()
        return usable

    def _lift(self) -> bool:
        """Takes the limit away; returns whether the gang still runs, and the calling thread works for it."""
        with self._lock:
            if self._workers == 0:
                return False
            self._workers += 1
            self._permits = math.inf
            return True

    def _admit(self) -> list[int]:
        """Gives free permits to tasks, lowest slot first; returns those that need a thread."""
        slots = []
        with self._lock:
            if self._interrupted:
                self._skip(above=-1)
            # Tasks that wait for a permit only want to end then.
            permits = math.inf if self._interrupted else self._permits
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
            with self._lock:
                self._workers += 1
            try:
                _pool.start(self, slot)
            except RuntimeError as error:  # the system has no more threads
                self._outcomes[slot].error = error
                self._settle(slot)
                self._leave()

    def _call(self, slot: int) -> None:
        """Runs the task. Only in here can the thread be interrupted; when this returns nothing is on its way."""
        outcome, task = self._outcomes[slot], self._tasks[slot]
        assert task is not None
        try:
            try:
                self._inside[slot] = threading.get_ident()
                _here.gang, _here.slot = self, slot
                if self._interrupted:
                    raise Interrupted
                outcome.value = task()
            except BaseException as error:
                # From here on the traceback begins in the task.
                outcome.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            self._step_out(slot)
        except Interrupted as error:  # it came late
            outcome.error = error.with_traceback(None)
        _here.gang = None

    def _step_out(self, slot: int) -> None:
        """After this the calling thread is not interrupted; an interrupt that has been sent arrives in here."""
        if self._inside.pop(slot, None) is None:
            while slot not in self._sent and not self._abandoned:
                time.sleep(0.001)
            time.sleep(0)

    def _settle(self, slot: int) -> None:
        """Notes that a task has ended."""
        with self._lock:
            self._steps += 1
            self._running.discard(slot)
            self._tasks[slot] = None
            if self._outcomes[slot].error is not None:
                self._skip(above=slot)

    def _skip(self, above: int) -> None:
        for slot in [slot for slot in self._waiting if slot > above]:
            self._waiting.remove(slot)
            self._outcomes[slot].error = Skipped()

    def _leave(self) -> None:
        """One thread less works for this gang; after the last one nothing runs any more."""
        with self._lock:
            self._workers -= 1
            if self._workers == 0:
                self._is_done = True
                self._done.release()

    def _pause(self, slot: int, nested: Gang) -> None:
        """Gives the permit of ``slot`` back, because its task begins to wait for ``nested``; it keeps its turn."""
        self._step_out(slot)
        with self._lock:
            self._steps += 1
            self._running.discard(slot)
            self._paused[slot] = nested
        if self._interrupted:
            # Nobody else may have seen it.
            nested._interrupted, nested._abandoned = True, self._abandoned
        self._start(self._admit())

    def _resume(self, slot: int) -> None:
        """Waits for a permit for ``slot`` again."""
        admitted = threading.Event()
        with self._lock:
            del self._paused[slot]
            self._resuming[slot] = admitted
        self._start(self._admit())
        admitted.wait()
        _here.gang, _here.slot = self, slot
        self._inside[slot] = threading.get_ident()
        if self._interrupted:
            raise Interrupted


class _Worker(threading.Thread):
    """A kept thread: works for one gang after the other."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"dataparallel-worker-{number}", daemon=True)
        self.jobs: SimpleQueue[tuple[Gang, int | None]] = SimpleQueue()

    def run(self) -> None:
        usable = True
        while usable:
            gang, slot = self.jobs.get()
            usable = gang.work(slot, self)
            del gang  # an idle thread keeps nothing of a call alive


class _Pool:
    """The idle threads of the process. Without a lock, which an interrupt could leave held."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._numbers = itertools.count()
        self.used = False
        self.engine_is_stale = False

    def start(self, gang: Gang, slot: int | None) -> None:
        self.used = True
        if self.engine_is_stale:
            # In a forked child torch destroys and rebuilds its autograd engine when it is next asked for it, which any
            # forward that saves a tensor does; two workers at once would both destroy it.
            _torch.rebuild_engine()
            self.engine_is_stale = False
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(next(self._numbers))
            worker.start()
        worker.jobs.put((gang, slot))

    def take_back(self, worker: _Worker) -> None:
        self._idle.append(worker)


_pool = _Pool()


def note_use() -> None:
    """Tasks have been run in this process: after a fork the child needs to know."""
    _pool.used = True


def _start_afresh_after_fork() -> None:
    """A forked child has none of the threads, and locks may have been held by them."""
    global _pool, _here
    if _pool.used:
        # torch's intra-op threads do not survive a fork either; waiting for them would hang.
        torch.set_num_threads(1)
    _pool, _here = _Pool(), _Here()
    _pool.engine_is_stale = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
