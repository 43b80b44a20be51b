"""What becomes of the tasks of one call, and how they wait: for ``gang``, ``in_turn`` and ``meetings``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dataparallel.replicas.compiled.gate import gate

POLL_SECONDS = 0.2
"""A thread that waits for a gang wakes up this often, to see signals and stalls."""


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
        """Called when the call raises. It breaks the cycle of the error, its frames, and the outcome that they hold."""
        self.value = self.error = None


class Turn:
    """What a task waits for until it may go on. It is given once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        # A lock, not an event: Ctrl-C inside ``Event.wait`` can turn into a RuntimeError of Python's own.
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        """Lets the task go on."""
        self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Waits for so many seconds at most, or without end. Returns true once the task may go on."""
        return self._lock.acquire(timeout=seconds)


class Polls:
    """For how long nothing has happened, by polls of `POLL_SECONDS`.

    Polls are counted, not seconds, because time in which the whole process was stopped does not count. Nor does time in
    which somebody compiles.
    """

    __slots__ = ("_count", "_seen")

    def __init__(self, seen: int) -> None:
        self._count, self._seen = 0, seen

    def seconds(self, seen: int, waits: bool) -> float:
        """Called at each poll. ``seen`` changes when something happens; ``waits``: somebody waits for that."""
        self._count = self._count + 1 if waits and seen == self._seen and not gate.is_taken else 0
        self._seen = seen
        return self._count * POLL_SECONDS
