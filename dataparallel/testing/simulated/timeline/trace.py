"""A schedule in the Chrome trace event format: see ``dataparallel.tracing.perfetto``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dataparallel.testing.simulated.timeline.answers import Answers
from dataparallel.testing.simulated.timeline.names import name_of_launch, name_of_stream
from dataparallel.tracing import perfetto
from dataparallel.tracing.perfetto import Event, microseconds, name, span

__all__ = ["write"]

HOST_PROCESS = 0
"""The host comes first; the process of device i is 1 + i."""


def write(answers: Answers, path: str | os.PathLike[str]) -> None:
    """Writes the file. `Schedule.save` says what it is for."""
    about = {"machine": answers.machine.name, "times": "a prediction, not a measurement"}
    perfetto.write(path, [*_rows(answers), *_slices(answers), *_arrows(answers)], about)


def _rows(answers: Answers) -> Iterator[Event]:
    """The names of processes and threads."""
    yield name("process_name", HOST_PROCESS, 0, "host")
    for thread in answers.threads:
        yield name("thread_name", HOST_PROCESS, thread.number, f"host thread {thread.number}")
    for device in range(answers.machine.devices):
        yield name("process_name", 1 + device, 0, f"device {device}")
    for position, stream in enumerate(answers.recording.streams):
        yield name("thread_name", 1 + stream.device, position, name_of_stream(stream))


def _slices(answers: Answers) -> Iterator[Event]:
    """Each launch twice: where the host issues it, and where it runs."""
    solution = answers.solution
    for launch in answers.recording.launches:
        index, called = launch.index, name_of_launch(launch)
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
            "ph": "X", "cat": "issue", "name": called, "args": {"launch": index}, **_host_row(answers, index),
            **span(solution.issue[index], solution.reached[index]),
        }  # fmt: skip
        yield {
            "ph": "X", "cat": "kernel" if launch.copy is None else "copy", "name": called, "args": about,
            **_device_row(answers, index), **span(solution.start[index], solution.end[index]),
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
            yield {"ph": "s", **about, **_device_row(answers, other), "ts": microseconds(solution.start[other])}
            yield {"ph": "f", "bp": "e", **about, **row, "ts": microseconds(time)}


def _host_row(answers: Answers, index: int) -> Event:
    return {"pid": HOST_PROCESS, "tid": answers.recording.launches[index].thread}


def _device_row(answers: Answers, index: int) -> Event:
    stream = answers.recording.launches[index].stream
    return {"pid": 1 + answers.recording.streams[stream].device, "tid": stream}
