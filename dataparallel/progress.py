"""`progress` draws a line on a terminal while something runs that may take minutes.

Any room may call it. It writes nothing unless stderr is a terminal and more than a second has passed, and the line is
gone at the end. tqdm draws it, and is imported for the first line that is drawn. tqdm's own environment variable
``TQDM_DISABLE=1`` turns all lines off. This is not for what each step of a training does: every line has a thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

SECONDS_BEFORE = 1.0
SECONDS_BETWEEN = 0.2


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Says on a terminal that the block is at work. The line ends with the block, also if the block raises.

    Args:
        what: the beginning of the line, such as "sharding Net".
        total: the number of steps; ``None`` for a line that has the time only.

    Yields:
        A function without arguments, which one thread calls after each step.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield _nothing
        return
    line = _Line(what, total, sys.stderr)
    line.start()
    try:
        yield line.step
    finally:
        line.over.set()
        line.join()


def _nothing() -> None:
    pass


class _Line(threading.Thread):
    """The thread that draws one line, so that a single long step does not stop its clock. It alone calls tqdm."""

    def __init__(self, what: str, total: int | None, stream: TextIO) -> None:
        super().__init__(name=f"dataparallel: {what}", daemon=True)
        self.over = threading.Event()
        self._what, self._total, self._stream = what, total, stream
        self._done = 0

    def step(self) -> None:
        self._done += 1

    def run(self) -> None:
        if self.over.wait(SECONDS_BEFORE):
            return
        from tqdm import tqdm

        class Bar(tqdm):
            monitor_interval = 0  # otherwise tqdm starts a thread that never ends

        form = "{desc} [{elapsed}]" if self._total is None else None
        with Bar(None, self._what, self._total, False, self._stream, bar_format=form, initial=self._done) as bar:
            while not self.over.wait(SECONDS_BETWEEN):
                bar.n = self._done
                bar.refresh()
