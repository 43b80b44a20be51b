"""A terminal that a test reads, in place of stderr."""

import io
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dataparallel import progress


class Terminal(io.StringIO):
    """Keeps all that is written to it. With ``is_terminal = False`` it is a file."""

    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal

    def on_screen(self) -> str:
        """What a person sees on the last line: what comes after a carriage return is written over what was there."""
        seen = ""
        for text in self.getvalue().split("\n")[-1].split("\r"):
            seen = text + seen[len(text) :]
        return seen.rstrip()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stderr is a terminal for progress, and every line is drawn at once, before the work that it is for begins."""
    terminal = Terminal()
    start = progress._Line.start  # a private name: the thread would not draw work that is over at once

    def start_and_draw(line: progress._Line) -> None:
        before = terminal.getvalue()
        start(line)
        wait_until(lambda: terminal.getvalue() != before)

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(progress, "SECONDS_BEFORE", 0)
    monkeypatch.setattr(progress._Line, "start", start_and_draw)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))  # pytest sets that of `sys` itself
    return terminal
