"""A trace as a file for Perfetto: the rows of the picture, and a mark for each copy between devices."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dataparallel.tracing.perfetto import Event, microseconds, name, span, write
from dataparallel.tracing.recorder import Recorder
from dataparallel.tracing.results import stage_of
from dataparallel.tracing.rows import Row, rows_of

__all__ = ["save"]

_HOST, _COPIES = 0, 1
"""Processes: the rows, and the copies."""


def save(recorder: Recorder, begin: int, path: str | os.PathLike[str]) -> None:
    """Writes the file. ``begin``: when the block began."""
    events = [*_rows(rows_of(recorder, begin)), *_copies(recorder, begin)]
    write(path, events, {"times": "measured on the host; copies are shown where they were launched"})


def _rows(rows: list[Row]) -> Iterator[Event]:
    yield name("process_name", _HOST, 0, "dataparallel")
    for thread, row in enumerate(rows):
        yield name("thread_name", _HOST, thread, row.title)
        for bar in row.bars:
            about = {"ph": "X", "cat": bar.stage, "name": bar.name, "pid": _HOST, "tid": thread}
            yield {**about, **span(bar.start, bar.end)}


def _copies(recorder: Recorder, begin: int) -> Iterator[Event]:
    pairs = {pair: i for i, pair in enumerate(sorted({(str(c.source), str(c.target)) for c in recorder.copies}))}
    if pairs:
        yield name("process_name", _COPIES, 0, "copies, launched")
    for (source, target), thread in pairs.items():
        yield name("thread_name", _COPIES, thread, f"{source} to {target}")
    for copy in recorder.copies:
        about = {"bytes": copy.number_of_bytes, "stage": stage_of(copy.stage)}
        row = {"pid": _COPIES, "tid": pairs[str(copy.source), str(copy.target)]}
        time = microseconds(1e-9 * (copy.time - begin))
        yield {"ph": "i", "s": "t", "cat": "copy", "name": copy.route, "args": about, "ts": time, **row}
