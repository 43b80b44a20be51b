"""Leaves out one guard of `guarded_calls` in this process: a wait or an event, by the place of its call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dataparallel.comm.streams.current import Event, GivenEvents, streams_set
from guarded_calls import Guard, guards_of

ROOT = Path(__file__).resolve().parent.parent

_ONLY_ORDER = {
    "wait_for",
    "meet",
    "_make_computing_wait",
    "release_deliveries",
    "make_wait",
    "synchronize",
    "<listcomp>",
    "<genexpr>",
}
"""Functions behind whose callers' lines an event may be recorded or waited for."""


def guards_in(folder: str) -> dict[str, Guard]:
    """The guards of a folder of the package, by their names below it."""
    found = [guard for guards in guards_of(ROOT).values() for guard in guards]
    return {g.name.removeprefix(folder): g for g in found if g.name.startswith(folder)}


@contextmanager
def left_out(guard: Guard, purpose: str | None = None) -> Iterator[list[bool]]:
    """Inside, nobody waits at the guard, or for what it records. Yields a list that grows each time it is reached.

    ``purpose``: only where the guard's function has been given this purpose.
    """
    file, source = str(ROOT / guard.file), (ROOT / guard.file).read_bytes()
    lines = range(source[: guard.start].count(b"\n") + 1, source[: guard.end].count(b"\n") + 2)
    reached: list[bool] = []

    def is_at(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_lineno in lines:
                if purpose is None or frame.f_locals["purpose"] == purpose:
                    reached.append(True)
                    return True
                return False
            if frame.f_code.co_name not in _ONLY_ORDER:
                return False
            frame = frame.f_back
        return False

    is_event = guard.how == "blank"

    def recording(record: Any) -> Any:
        def recorded(event: Any, given: Any, **options: Any) -> None:
            record(event, given, **options)
            event.is_left_out = is_event and is_at(sys._getframe(1))

        return recorded

    def waiting(wait: Any) -> Any:
        def waited(event: Any, *stream: Any) -> None:
            if not event.is_left_out and (is_event or not is_at(sys._getframe(1))):
                wait(event, *stream)

        return waited

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "is_left_out", False, raising=False)  # of those that have been recorded before
        for kind in (Event, GivenEvents):
            patch.setattr(kind, "__init__", recording(kind.__init__))
            patch.setattr(kind, "make_wait", waiting(kind.make_wait))
            patch.setattr(kind, "synchronize", waiting(kind.synchronize))
        if guard.how == "streams_joined":
            module = sys.modules[guard.file.removesuffix(".py").replace("/", ".")]
            patch.setattr(module, "streams_joined", streams_set)
        yield reached
