"""Files in the Chrome trace event format ("Trace Event Format", Google, 2016), which Perfetto shows.

Times are microseconds, with three digits after the point, since Perfetto counts nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def name(kind: str, process: int, thread: int, name: str) -> Event:
    """What a process or a thread is called; ``kind`` is "process_name" or "thread_name"."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def span(start: float, end: float) -> Event:
    """The times of a slice, given in seconds."""
    # Both ends are rounded, not the length: slices of a row that touch still touch.
    return {"ts": _ns(start) / 1e3, "dur": (_ns(end) - _ns(start)) / 1e3}


def microseconds(seconds: float) -> float:
    """A time as the format has it."""
    return _ns(seconds) / 1e3


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def write(path: str | os.PathLike[str], events: Iterable[Event], about: dict[str, Any]) -> None:
    """Writes the file. ``about`` is what else there is to say of it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": [*events], "displayTimeUnit": "ms", "otherData": about}, file)
