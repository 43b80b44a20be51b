"""Switches of the clocks for a front end: which blocks are open, and what they say.

``simulated.clocks`` and ``cuda.watching`` each have one `Switches`, and call the compiled module of their devices by
it. The clocks themselves are in ``csrc/shared``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Switches"]


class Switches:
    """Whether the clocks of a process watch, and whether they keep Python stacks.

    Args:
        compiled: returns the compiled module of the devices.
    """

    def __init__(self, compiled: Callable[[], Any]) -> None:
        self._compiled = compiled
        self._lock = threading.Lock()
        self._open_blocks: list[dict[str, bool]] = []  # what each open block sets, in the order of entry

    @contextmanager
    def set(self, enabled: bool, stacks: bool | None) -> Iterator[None]:
        """Sets them while inside, for all threads. If several blocks are open, the one entered last decides."""
        switches = {"clocks": enabled} if stacks is None else {"clocks": enabled, "stacks": stacks}
        with self._lock:
            self._open_blocks.append(switches)
            self._switch()
        try:
            yield
        finally:
            with self._lock:
                # Another block may have set the same.
                self._open_blocks[:] = [block for block in self._open_blocks if block is not switches]
                self._switch()

    def _switch(self) -> None:
        """Applies the switches of the open blocks. The caller holds the lock."""
        now = {"clocks": True, "stacks": False}
        for switches in self._open_blocks:
            now.update(switches)
        self._compiled().enable_clocks(now["clocks"])
        self._compiled().keep_stacks(now["stacks"])
