"""Threads that are kept between calls, by device or any other key.

A job takes an idle thread of its device, and if there is none a new one is made, so no job waits for another. cuBLAS
and cuDNN keep handles and memory for each pair of thread and device until the thread ends, so a job never gets a thread
of another device, as long as the system has threads. A job itself calls `release` when its thread is idle again.
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


class Worker(threading.Thread):
    """A kept thread."""

    def __init__(self, number: int, device: Hashable) -> None:
        super().__init__(name=f"dataparallel-worker-{number}", daemon=True)
        self.device = device
        self.jobs: SimpleQueue[Job] = SimpleQueue()

    def run(self) -> None:
        """Never returns: the thread ends with the process."""
        while True:
            job = self.jobs.get()
            job(self)
            del job  # an idle thread keeps nothing of a call alive


Job = Callable[[Worker], object]


# There is no lock: every step is one atomic operation of a dict or a deque. Ctrl-C in the calling thread loses an idle
# thread at worst.
_idle: dict[Hashable, deque[Worker]] = {}
_numbers = itertools.count()
_used = False
_engine_is_stale = False


def start(job: Job, device: Hashable) -> None:
    """Makes a thread of ``device`` call ``job(worker)``. The job calls `release` when it has nothing left to do.

    Raises:
        RuntimeError: no thread is idle, and the system has no more threads.
    """
    global _engine_is_stale
    note_use()
    if _engine_is_stale:
        # In a forked child torch destroys and rebuilds its autograd engine when it is next used, which any forward
        # that saves a tensor does. Two workers at once would both destroy it.
        _torch.rebuild_engine()
        _engine_is_stale = False
    worker = _take(device)
    if worker is not None:
        worker.jobs.put(job)
        return
    worker = Worker(next(_numbers), device)
    worker.jobs.put(job)  # before it starts, because Ctrl-C may come right after that
    try:
        worker.start()
    except RuntimeError:  # the system has no more threads: take an idle one of any device
        idle = next(filter(None, map(_take, list(_idle))), None)
        if idle is None:
            raise
        idle.jobs.put(job)


def release(worker: Worker) -> None:
    """Called by a job that is about to end: from now on ``worker`` may get another job."""
    _idle.setdefault(worker.device, deque()).append(worker)


def note_use() -> None:
    """Notes that replicas have run in this process, in whatever thread. A forked child needs to know."""
    global _used
    _used = True


def _take(device: Hashable) -> Worker | None:
    try:
        return _idle[device].pop()
    except LookupError:
        return None


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A forked child has none of the threads."""
    global _used, _engine_is_stale
    if _used:
        # torch's intra-op threads do not survive a fork either, and waiting for them would hang.
        torch.set_num_threads(1)
    _idle.clear()
    _used, _engine_is_stale = False, True
