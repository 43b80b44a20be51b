"""Threads that are kept between calls, each for one home.

They belong to the process: a job takes an idle thread, and where there is none a new one is made, so that no job waits
for another. A *home* is the device that a job is for, or any other key: cuBLAS and cuDNN keep handles and memory for
each pair of thread and device until the thread ends. So a job gets a thread that was made for its home, never an idle
one of another home as long as the system has threads. Each home has as many threads as its jobs have needed at a time.

What a job is, and when it is over, is the business of ``workers``: a job says itself when its thread is idle again.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue

import torch

from dataparallel import _torch
from dataparallel.forks import in_forked_child

__all__ = ["Job", "Worker", "note_use", "start", "take_back"]


class Worker(threading.Thread):
    """A kept thread: runs one job after the other."""

    def __init__(self, number: int, home: Hashable) -> None:
        super().__init__(name=f"dataparallel-worker-{number}", daemon=True)
        self.home = home
        self.jobs: SimpleQueue[Job] = SimpleQueue()

    def run(self) -> None:
        """Never returns: the thread ends with the process."""
        while True:
            job = self.jobs.get()
            job(self)
            del job  # an idle thread keeps nothing of a call alive


Job = Callable[[Worker], object]


class Pool:
    """The idle threads, by home.

    There is no lock: every step is one operation of a dict or a deque, so that Ctrl-C in the calling thread at worst
    loses an idle thread.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, deque[Worker]] = {}
        self._numbers = itertools.count()
        self.used = False
        self.engine_is_stale = False

    def start(self, job: Job, home: Hashable) -> None:
        """Has a thread run ``job``; see the function `start`."""
        self.used = True
        if self.engine_is_stale:
            # In a forked child torch destroys and rebuilds its autograd engine when it is next asked for it, which any
            # forward that saves a tensor does; two workers at once would both destroy it.
            _torch.rebuild_engine()
            self.engine_is_stale = False
        worker = self._take(home)
        if worker is not None:
            worker.jobs.put(job)
            return
        worker = Worker(next(self._numbers), home)
        worker.jobs.put(job)  # before it starts: Ctrl-C may come as soon as it has
        try:
            worker.start()
        except RuntimeError:  # the system has no more threads: better one of another home than none
            idle = next(filter(None, map(self._take, list(self._idle))), None)
            if idle is None:
                raise
            idle.jobs.put(job)

    def take_back(self, worker: Worker) -> None:
        """The thread is idle again."""
        self._idle.setdefault(worker.home, deque()).append(worker)

    def _take(self, home: Hashable) -> Worker | None:
        """The thread of ``home`` that went idle last."""
        try:
            return self._idle[home].pop()
        except LookupError:
            return None


_pool = Pool()


def start(job: Job, home: Hashable) -> None:
    """Has a thread of ``home`` call ``job`` with its `Worker`. Once it has nothing to do, the job calls `take_back`.

    Raises:
        RuntimeError: no thread is idle, and the system has no more.
    """
    _pool.start(job, home)


def take_back(worker: Worker) -> None:
    """Called in a job when it is about to end: from now on ``worker`` may be given another one."""
    _pool.take_back(worker)


def note_use() -> None:
    """Replicas have been run in this process: after a fork the child needs to know."""
    _pool.used = True


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A forked child has none of the threads."""
    global _pool
    if _pool.used:
        # torch's intra-op threads do not survive a fork either; waiting for them would hang.
        torch.set_num_threads(1)
    _pool = Pool()
    _pool.engine_is_stale = True
