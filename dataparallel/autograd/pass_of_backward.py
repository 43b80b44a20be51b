"""`PassOfBackward`: keeps objects while a backward pass runs, and calls functions when it succeeds or fails.

A pass is one run of torch's engine, also one that a reentrant checkpoint nests in another. The backward of a node calls
`running_pass` to get its pass. This file does not know what a pass computes.
"""

from __future__ import annotations

import gc
import math
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from dataparallel import _torch

T = TypeVar("T")

_COUNTS_ARE_BIASED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_FIRST_NAP, _LONGEST_NAP = 0.05, 1.0  # seconds

_passes: dict[int, PassOfBackward] = {}  # the passes that run, by the engine's number


def running_pass() -> PassOfBackward:
    """The pass in which the calling thread runs a node or an end function. All its threads get the same object."""
    number = _torch.current_graph_task_id()
    running = _passes.get(number)
    if running is None:
        new = PassOfBackward(number)
        running = _passes.setdefault(number, new)  # without a lock: the garbage collector may end a pass anywhere
        if running is new:
            try:
                _torch.queue_callback(_EndCallback(new))
            except BaseException:
                del _passes[number]
                raise
    return running


def wait_for_passes(changed: threading.Condition, are_over: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Waits until passes are over, as `Condition.wait_for` does; ``changed``, whose lock is held, is notified then.

    A failed pass ends when the engine drops an object of Python (`_EndCallback`). In builds of Python without the lock
    an object that another thread has made is freed when that thread runs Python next, and a thread of the engine may
    never do so. There the garbage collector frees it, if the pass has not ended before.
    """
    until, nap = time.monotonic() + seconds, _FIRST_NAP
    while not are_over():
        left = until - time.monotonic()
        if left <= 0:
            return False
        changed.wait(min(left, nap) if _COUNTS_ARE_BIASED else None if left == math.inf else left)
        if _COUNTS_ARE_BIASED and not are_over():
            changed.release()  # destructors run, and may want the lock in another thread
            try:
                gc.collect()
            finally:
                changed.acquire()
            nap = min(2 * nap, _LONGEST_NAP)
    return True


def error_of_failed_pass() -> RuntimeError:
    """An error for threads that wait for a failed pass. The engine raises the pass's own error at ``backward()``."""
    return RuntimeError("a backward has failed; it raised its own error")


class PassOfBackward:
    """One pass. Its threads may use this object at the same time. Other files keep objects in its ``contents``."""

    def __init__(self, number: int) -> None:
        self.contents: dict[Hashable, object] = {}
        self._number = number
        self._at_end: deque[Callable[[bool], object]] = deque()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[PassOfBackward], T]) -> T:
        """The object that is kept under ``key``. The first call in the pass makes it by ``make(self)``."""
        with self._lock:
            if key not in self.contents:
                self.contents[key] = make(self)
            return self.contents[key]  # type: ignore[return-value]

    def is_first(self, key: Hashable) -> bool:
        token = object()
        return self.contents.setdefault(key, token) is token

    def on_end(self, function: Callable[[bool], object]) -> None:
        """Calls ``function(ok)`` when the pass ends, after the functions of earlier calls of this method.

        ``True`` means that the pass has succeeded so far. The function runs where ``backward()`` was called. If it
        raises, the pass has failed, and later functions get ``False``. ``False`` also means that an error has ended the
        pass and all threads have left it; the function runs in any thread.
        """
        self._at_end.append(function)

    def end_pass(self, ok: bool) -> None:
        """Calls the functions that have not been called."""
        try:
            while self._at_end:
                self._at_end.popleft()(ok)  # a function may hold much memory, and is dropped when it has been called
        except BaseException as error:
            try:
                self.end_pass(False)
            except BaseException as further:
                raise error from further
            raise
        self.contents.clear()
        _passes.pop(self._number, None)


class _EndCallback:
    """The engine calls this object when a pass succeeds. If it fails, the engine drops this when all threads left."""

    def __init__(self, running: PassOfBackward) -> None:
        self._pass = running

    def __call__(self) -> None:
        self._pass.end_pass(True)

    def __del__(self) -> None:
        self._pass.end_pass(False)
