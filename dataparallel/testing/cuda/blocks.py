"""What is switched on while a ``with`` block is open, in any thread. ``watching`` and ``late`` have such blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Blocks"]


class Blocks:
    """Switches something on while blocks of any thread are open.

    Args:
        switch: is called with true or false when a block begins and ends, by one thread at a time.
    """

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self._switch, self._lock, self._open = switch, threading.Lock(), 0

    def begin(self) -> None:
        """A block begins."""
        self._count(1)

    def end(self) -> None:
        """A block ends."""
        self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._switch(self._open + more > 0)
            self._open += more
