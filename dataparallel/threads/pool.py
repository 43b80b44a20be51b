"""`start` runs a job in a kept thread of its device. `Outcome` and `Turn` are for the tasks of a call.

A job takes an idle thread of its device or else a new thread, so no job waits for another job. cuBLAS and cuDNN keep
handles and memory for each pair of thread and device until the thread ends, so devices have threads of their own.
"""

from __future__ import annotations

import itertools
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from dataparallel import _torch
from dataparallel.forks import in_forked_child

POLL_SECONDS = 0.2
"""A thread that waits for a gang wakes up this often, to see signals and stalls."""


_NAP_SECONDS = POLL_SECONDS if sysconfig.get_config_var("Py_GIL_DISABLED") else None
"""How long an idle worker sleeps. Builds of Python without the lock count the references of the thread that made an
object apart from those of others. If another thread drops the last one, the object, and the memory of its tensors, is
freed when the thread that made it runs next. What a replica has made should not stay until the next call."""


class Worker(threading.Thread):
    """A thread that is kept between calls."""

    def __init__(self, number: int, device: Hashable) -> None:
        super().__init__(name=f"dataparallel-worker-{number}", daemon=True)
        self.device = device
        self.jobs: SimpleQueue[Job] = SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=_NAP_SECONDS)
            except Empty:
                continue
            job(self)
            del job  # an idle thread keeps nothing of a call alive


Job = Callable[[Worker], object]


# They have no lock: every step is one atomic operation of a dict or a deque. Ctrl-C in the calling thread loses an idle
# thread at worst.
_idle: dict[Hashable, deque[Worker]] = {}
_numbers = itertools.count()
_used = False
_engine_is_stale = False
_rebuilding = threading.Lock()


def start(job: Job, device: Hashable) -> None:
    """Makes a thread of ``device`` call ``job(worker)``. The job calls `release` when it has nothing left to do."""
    global _engine_is_stale
    note_use()
    if _engine_is_stale:
        # In a forked child torch destroys and rebuilds its autograd engine when it is next used, which any forward
        # that saves a tensor does. Two threads at once would both destroy it.
        with _rebuilding:
            if _engine_is_stale:
                _torch.rebuild_engine()
                _engine_is_stale = False
    try:
        worker = _idle[device].pop()
    except LookupError:
        worker = Worker(next(_numbers), device)
        worker.jobs.put(job)  # before the thread starts, because Ctrl-C may come right after the start
        worker.start()
    else:
        worker.jobs.put(job)


def release(worker: Worker) -> None:
    """Called by a job that is about to end: from now on ``worker`` may get another job."""
    _idle.setdefault(worker.device, deque()).append(worker)


def note_use() -> None:
    """Notes that replicas have run in this process, in any thread. `_start_afresh_after_fork` reads this."""
    global _used
    _used = True


@in_forked_child
def _start_afresh_after_fork() -> None:
    global _used, _engine_is_stale, _rebuilding
    _rebuilding = threading.Lock()
    if _used:
        # torch's intra-op threads do not survive a fork either, and waiting for them would hang.
        torch.set_num_threads(1)
    _idle.clear()
    _used, _engine_is_stale = False, True


class Skipped(Exception):
    """The error of a task that was not started, because an earlier slot had failed or Ctrl-C was pressed."""


class Outcome:
    """The result of one task: ``error`` if it is not ``None``, else ``value``."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def fill(self, task: Callable[[], Any]) -> None:
        """Runs the task. The traceback of its error begins in the task."""
        try:
            self.value = task()
        except BaseException as error:
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def clear(self) -> None:
        """Called when the call raises. Breaks the cycle: the error holds frames, and the frames hold this outcome."""
        self.value = self.error = None


class Turn:
    """A task that waits calls `wait`, and goes on when another thread has called `give`. That happens once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        # A lock, not an event: Ctrl-C inside ``Event.wait`` can turn into a RuntimeError of Python's own.
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Waits for so many seconds at most, or without end. Returns true once the task may go on."""
        return self._lock.acquire(timeout=seconds)
