"""What the clocks of the calling thread say: how long it has run, and how long it has waited for a core.

Linux tells the second in ``/proc/thread-self/schedstat`` (Documentation/scheduler/sched-stats.rst in its source): the
second of three numbers is the time, in nanoseconds, in which the thread could run and had no core. Where there is no
such file, that time is unknown, and is part of what a thread waits for other things.

Python's own functions for files give its lock away for the time of a call, and a thread that does so beside others may
get it back only after milliseconds. That would be most of what a trace measures. So the file is read by the C library's
``pread`` through ``ctypes.PyDLL``, which keeps the lock.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from io import FileIO

__all__ = ["ThreadClocks"]

_SCHEDSTAT = "/proc/thread-self/schedstat"
_LONGEST = 96
"""Bytes. Three numbers of 64 bits are shorter."""


class ThreadClocks:
    """The clocks of the thread that makes this object. No other thread may read them."""

    def __init__(self, path: str = _SCHEDSTAT) -> None:
        self._file: FileIO | None = None
        self._read = ctypes.create_string_buffer(_LONGEST)
        try:
            self._file = FileIO(path)
            self.waited_for_core()
        except (OSError, AttributeError, IndexError, ValueError):  # no such file, no such function, or another format
            self._file = None

    def ran(self) -> int:
        """Nanoseconds for which the thread has run."""
        return time.thread_time_ns()

    def waited_for_core(self) -> int | None:
        """Nanoseconds in which the thread could run and had no core; ``None`` if the system does not tell."""
        if self._file is None:
            return None
        _pread()(self._file.fileno(), self._read, _LONGEST, 0)
        return int(self._read.value.split()[1])


@cache
def _pread() -> Callable[..., int]:
    found = ctypes.PyDLL(None).pread
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
    found.restype = ctypes.c_ssize_t
    return found
