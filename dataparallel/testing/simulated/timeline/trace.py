"""A schedule in the Chrome trace event format, which Perfetto and ``chrome://tracing`` show.

The format is described in "Trace Event Format" (Google, 2016). Its times are microseconds; here they have three digits
after the point, since Perfetto counts nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from dataparallel.testing.simulated.timeline.answers import Answers
from dataparallel.testing.simulated.timeline.names import name_of_launch, name_of_stream

__all__ = ["write"]

Event = dict[str, Any]

HOST_PROCESS = 0
"""The host comes first; the process of device i is 1 + i."""


def write(answers: Answers, path: str | os.PathLike[str]) -> None:
    """Writes the file. `Schedule.save` says what it is for."""
    events = [*_rows(answers), *_slices(answers), *_arrows(answers)]
    about = {"machine": answers.machine.name, "times": "a prediction, not a measurement"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, file)


def _rows(answers: Answers) -> Iterator[Event]:
    """The names of processes and threads."""
    yield _name("process_name", HOST_PROCESS, 0, "host")
    for thread in answers.threads:
        yield _name("thread_name", HOST_PROCESS, thread.number, f"host thread {thread.number}")
    for device in range(answers.machine.devices):
        yield _name("process_name", 1 + device, 0, f"device {device}")
    for position, stream in enumerate(answers.recording.streams):
        yield _name("thread_name", 1 + stream.device, position, name_of_stream(stream))


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slices(answers: Answers) -> Iterator[Event]:
    """Each launch twice: where the host issues it, and where it runs."""
    solution = answers.solution
    for launch in answers.recording.launches:
        index, name = launch.index, name_of_launch(launch)
        about = {
            "launch": index,
            "bytes read": launch.bytes_read,
            "bytes written": launch.bytes_written,
            "FLOPs": launch.flops,
            "dtype": launch.dtype,
            "shapes": str([list(shape) for shape in launch.shapes]),
            "starts after": _words(answers, index),
        }
        if launch.stack:
            about["stack"] = launch.stack
        yield {
            "ph": "X", "cat": "issue", "name": name, "args": {"launch": index}, **_host_row(answers, index),
            **_span(solution.issue[index], solution.reached[index]),
        }  # fmt: skip
        yield {
            "ph": "X", "cat": "kernel" if launch.copy is None else "copy", "name": name, "args": about,
            **_device_row(answers, index), **_span(solution.start[index], solution.end[index]),
        }  # fmt: skip


def _words(answers: Answers, index: int) -> str:
    bound = answers.solution.start_bound[index]
    if bound.kind == "host":
        return "the host has issued it"
    other = f"launch {bound.launch} ({name_of_launch(answers.recording.launches[bound.launch])})"
    return f"link {bound.link} is free of {other}" if bound.link else f"{other}, by its {bound.kind}"


def _arrows(answers: Answers) -> Iterator[Event]:
    """An arrow for each wait of a stream, and for each wait of the host."""
    solution, number = answers.solution, 0
    for launch in answers.recording.launches:
        index = launch.index
        waits = [(other, "wait", _device_row(answers, index), solution.start[index]) for other in launch.waits]
        waits += [(other, "host wait", _host_row(answers, index), solution.issue[index]) for other in launch.host_waits]
        for other, kind, row, time in waits:
            number += 1
            about = {"cat": kind, "name": kind, "id": number}
            # Both events lie at the beginning of their slices, so that they belong to no other.
            yield {"ph": "s", **about, **_device_row(answers, other), "ts": _ns(solution.start[other]) / 1e3}
            yield {"ph": "f", "bp": "e", **about, **row, "ts": _ns(time) / 1e3}


def _host_row(answers: Answers, index: int) -> Event:
    return {"pid": HOST_PROCESS, "tid": answers.recording.launches[index].thread}


def _device_row(answers: Answers, index: int) -> Event:
    stream = answers.recording.launches[index].stream
    return {"pid": 1 + answers.recording.streams[stream].device, "tid": stream}


def _span(start: float, end: float) -> Event:
    # Both ends are rounded, not the length: slices of a row that touch still touch.
    return {"ts": _ns(start) / 1e3, "dur": (_ns(end) - _ns(start)) / 1e3}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
