"""Threads that run replicas: gangs, permits, wake-ups.

A *gang* is the tasks of one call. At most ``permits`` of them run Python at a time, started in slot order; tasks with
the same *turn* never run at the same time. A task that waits for a nested call gives its permit back meanwhile, so
that another task of its gang can start, and takes one again before it goes on; it keeps its turn. Nested and concurrent
calls have gangs and permits of their own, so none waits for a worker that waits for it.

Threads are kept between calls and belong to the process: a gang takes idle ones, and more are made when there are
none, so a gang never waits for threads. A task is anything callable; what it means is ``parallel_apply``'s business.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

__all__ = ["Gang", "Interrupted", "Outcome", "Skipped"]


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

    A task is in ``_waiting``, then in ``_running``; while it waits for a nested call it is in ``_paused``, and then in
    ``_resuming`` until it has a permit again. These fields are read and written only with ``_lock`` held.
    """

    def __init__(
        self, tasks: Sequence[Callable[[], Any]], permits: int, turns: Sequence[Hashable | None] | None = None
    ) -> None:
        if permits < 1:
            raise ValueError(f"a gang needs at least 1 permit; got {permits}")
        self._tasks = list(tasks)
        self._turns: list[Hashable | None] = [None] * len(self._tasks) if turns is None else list(turns)
        self._permits: float = permits
        self.outcomes = [Outcome() for _ in self._tasks]
        self._lock = threading.Lock()
        self._all_done = threading.Event()
        self._waiting = list(range(len(self._tasks)))
        self._running: set[int] = set()
        self._paused: dict[int, Gang] = {}
        self._resuming: dict[int, threading.Event] = {}
        self._inside: dict[int, int] = {}  # slot -> ident of the thread that may be interrupted
        self._workers = 0  # threads started for this gang and not yet given back
        self._interrupted = False

    def run(self) -> list[Outcome]:
        """Runs the tasks and returns when none is running any more.

        Once a task has failed, tasks of higher slots that have not started are skipped. An exception in the waiting
        thread (``KeyboardInterrupt``) makes running tasks end after the operator that they are in, and is raised when
        they have; a second one abandons their threads and is raised at once.
        """
        outer, slot = _here.gang, _here.slot
        if outer is None:
            self._run()
        else:
            with outer._paused_for(self, slot):
                self._run()
        return self.outcomes

    def _run(self) -> None:
        try:
            self._start(self._admit())
            if self._tasks:
                self._all_done.wait()
        except BaseException:
            self._interrupt()
            self._all_done.wait()
            raise

    def _admit(self) -> list[int]:
        """Gives free permits to tasks, lowest slot first; returns those that need a thread."""
        to_start = []
        with self._lock:
            held = {self._turns[slot] for slot in itertools.chain(self._running, self._paused, self._resuming)}
            for slot in sorted(itertools.chain(self._waiting, self._resuming)):
                if len(self._running) >= self._permits:
                    break
                if slot in self._resuming:
                    self._running.add(slot)
                    self._resuming.pop(slot).set()
                elif self._turns[slot] is None or self._turns[slot] not in held:
                    held.add(self._turns[slot])
                    self._waiting.remove(slot)
                    self._running.add(slot)
                    self._workers += 1
                    to_start.append(slot)
        return to_start

    def _start(self, slots: list[int]) -> None:
        for slot in slots:
            try:
                _pool.start(self, slot)
            except RuntimeError as error:  # the system has no more threads
                self.outcomes[slot].error = error
                self._settle(slot)
                self._give_back_worker()

    def work(self, slot: int, worker: _Worker) -> bool:
        """Called by a worker: runs the task of ``slot``, then others as permits become free.

        Returns whether the thread is in the pool again; one that may have been interrupted is not used any more.
        """
        while True:
            self._call(slot)
            self._settle(slot)
            to_start = self._admit()
            if not to_start:
                break
            slot = to_start[0]
            with self._lock:
                self._workers -= 1  # this thread goes on with the first of them
            self._start(to_start[1:])
        # Back to the pool first: whoever waits for this gang finds the thread idle in its next call.
        usable = not self._interrupted
        if usable:
            _pool.take_back(worker)
        self._give_back_worker()
        return usable

    def _call(self, slot: int) -> None:
        outcome = self.outcomes[slot]
        try:
            with self._lock:
                if self._interrupted:
                    raise Interrupted
                self._inside[slot] = threading.get_ident()
            _here.gang, _here.slot = self, slot
            outcome.value = self._tasks[slot]()
        except BaseException as error:
            # From here on the traceback begins in the task.
            outcome.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def _settle(self, slot: int) -> None:
        """Notes that a task has ended. May be repeated: an interrupt can arrive as late as here."""
        while True:
            try:
                _here.gang = None
                with self._lock:
                    self._inside.pop(slot, None)
                    self._running.discard(slot)
                    if self.outcomes[slot].error is not None:
                        self._skip(above=slot)
                return
            except Interrupted:
                continue

    def _skip(self, above: int) -> None:
        for slot in [slot for slot in self._waiting if slot > above]:
            self._waiting.remove(slot)
            self.outcomes[slot].error = Skipped()

    def _give_back_worker(self) -> None:
        with self._lock:
            self._workers -= 1
            if self._workers == 0:
                self._all_done.set()

    @contextmanager
    def _paused_for(self, nested: Gang, slot: int) -> Iterator[None]:
        """Gives the permit of ``slot`` back while its task waits for a nested gang."""
        with self._lock:
            if self._interrupted:
                raise Interrupted
            self._running.discard(slot)
            self._paused[slot] = nested
        self._start(self._admit())
        try:
            yield
        finally:
            resumed = threading.Event()
            with self._lock:
                del self._paused[slot]
                self._resuming[slot] = resumed
            self._start(self._admit())
            resumed.wait()
            _here.gang, _here.slot = self, slot

    def _interrupt(self) -> None:
        """Starts no further task, and raises `Interrupted` in those that run as soon as they are back in Python."""
        with self._lock:
            if self._interrupted:
                return
            self._interrupted = True
            self._permits = math.inf  # tasks that wait for a permit only want to end
            self._skip(above=-1)
            # With the lock held: a task that ends now finds the exception in `_settle`, not later.
            for ident in self._inside.values():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupted))
            nested = list(self._paused.values())
            if self._workers == 0:
                self._all_done.set()
        self._admit()
        for gang in nested:
            gang._interrupt()


class _Worker(threading.Thread):
    """A kept thread: works for one gang after the other."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"dataparallel-worker-{number}", daemon=True)
        self.jobs: SimpleQueue[tuple[Gang, int]] = SimpleQueue()

    def run(self) -> None:
        usable = True
        while usable:
            gang, slot = self.jobs.get()
            usable = gang.work(slot, self)
            del gang  # an idle thread keeps nothing of a call alive


class _Pool:
    """The idle threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._numbers = itertools.count()
        self.used = False

    def start(self, gang: Gang, slot: int) -> None:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
            self.used = True
        if worker is None:
            worker = _Worker(next(self._numbers))
            worker.start()
        worker.jobs.put((gang, slot))

    def take_back(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)


_pool = _Pool()


def _start_afresh_after_fork() -> None:
    """A forked child has none of the threads, and locks may have been held by them."""
    global _pool, _here
    if _pool.used:
        # torch's intra-op threads do not survive a fork either; waiting for them would hang.
        torch.set_num_threads(1)
    _pool, _here = _Pool(), _Here()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh_after_fork)
