"""The lock: while one thread compiles, no other thread of the library is in compiled code.

While ``torch.compile`` traces it sets flags of the whole process, and compiled code that another thread enters then
raises or runs without its graphs. The lock is one that many share (`run_inside`) and one has alone (`run_alone`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dataparallel.forks import in_forked_child

T = TypeVar("T")

_POLL_SECONDS = 0.002


class CompileLock:
    """A lock of compiled code. There is one for the process, `compile_lock`; tests make others. Who waits for whom:

    - A thread that enters compiled code waits until nobody compiles.
    - A thread that has to compile is inside compiled code, where it looked for a graph. It counts as outside from then
      on, waits for its turn, and then until every other thread is outside. At the end it goes inside again.
    - A thread that waits at the lock is outside. So is one that waits, inside compiled code, for other threads of the
      library: `run_aside` says so. So no thread waits for one that waits for it.

    The tables are keyed by thread. Each thread writes its own entries only, each by one atomic operation; those that
    let others pass are in a ``finally``, so an interrupt leaves the lock open. A thread that enters and a thread that
    takes its turn hold a lock while they look and write. So one of the two comes first, and the other one sees it.
    Nobody is woken: threads look again and again, which is cheap beside compiling.
    """

    def __init__(self) -> None:
        self._inside: dict[int, bool] = {}
        self._alone: dict[int, bool] = {}  # at most one thread
        self._deciding = threading.Lock()  # held for a moment, to enter or to take a turn
        self.turns = 0
        """How many turns have begun."""

    @property
    def is_taken(self) -> bool:
        """True while a thread compiles, or waits for others to leave compiled code."""
        return bool(self._alone)

    def run_inside(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Calls ``function``, which runs compiled code, once nobody compiles."""
        me = threading.get_ident()
        if me in self._inside or me in self._alone:
            return function(*args, **kwargs)
        try:
            self._note_in(self._inside, me)
            return function(*args, **kwargs)
        finally:
            self._inside.pop(me, None)

    def run_alone(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Calls ``function``, which compiles, once no other thread is inside."""
        me = threading.get_ident()
        if me in self._alone:
            return function(*args, **kwargs)
        was_inside = self._inside.pop(me, False)
        try:
            self._note_in(self._alone, me)
            self.turns += 1
            while self._inside:
                time.sleep(_POLL_SECONDS)
            return function(*args, **kwargs)
        finally:
            self._alone.pop(me, None)
            if was_inside:
                self._note_in(self._inside, me)

    def run_aside(self, function: Callable[..., T], *args: Any) -> T:
        """Calls ``function``, which waits for other threads and runs no compiled code of this thread meanwhile."""
        me = threading.get_ident()
        if not self._inside.pop(me, False):
            return function(*args)
        try:
            return function(*args)
        finally:
            self._note_in(self._inside, me)

    def _note_in(self, threads: dict[int, bool], me: int) -> None:
        """Notes this thread in one of the tables, once nobody is alone."""
        while True:
            with self._deciding:
                if not self._alone:
                    threads[me] = True
                    return
            time.sleep(_POLL_SECONDS)


compile_lock = CompileLock()
"""The lock of this process."""


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Threads of the parent that were inside, or compiled, do not exist in a forked child."""
    compile_lock.__init__()  # type: ignore[misc]
