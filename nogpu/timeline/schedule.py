"""A schedule: when each launch runs on a machine, and what that says of the step.

It is shown as a table, as a picture, and in the Chrome trace event format (``nogpu.timeline.perfetto``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from nogpu.tables import aligned
from nogpu.timeline import breakdown, perfetto
from nogpu.timeline.breakdown import Busy, Step, Thread, Wait, WaitGroup
from nogpu.timeline.intervals import length_of_union
from nogpu.timeline.launches import Recording, by_device, name_of_launch, name_of_stream
from nogpu.timeline.machine import Machine
from nogpu.timeline.perfetto import Event, microseconds, name, span
from nogpu.timeline.solve import Solution, solve

ROWS = 10
"""How many waits, links and parts of the critical path are shown, the largest first."""


class Schedule:
    """When each launch of a recording would run on a machine, and what follows from it.

    All times are seconds, those of launches from the beginning. Everything is computed when it is first asked for.

    Attributes:
        solution: the times of all launches, and what bound them.
    """

    def __init__(self, solution: Solution) -> None:
        self.solution = solution

    @property
    def recording(self) -> Recording:
        """What was scheduled."""
        return self.solution.recording

    @property
    def machine(self) -> Machine:
        """Where it was scheduled."""
        return self.solution.machine

    @property
    def issue(self) -> list[float]:
        """For each launch when the host begins to issue it."""
        return self.solution.issue

    @property
    def start(self) -> list[float]:
        """For each launch when its device starts it."""
        return self.solution.start

    @property
    def end(self) -> list[float]:
        """For each launch when its device has ended it."""
        return self.solution.end

    @cached_property
    def time(self) -> float:
        """The time of the step: when the last launch has ended."""
        return self.solution.time

    @cached_property
    def streams(self) -> list[Busy]:
        """What each stream of the recording does."""
        return breakdown.busy_streams(self.solution)

    @cached_property
    def devices(self) -> list[Busy]:
        """What each device of the machine does."""
        return breakdown.busy_devices(self.solution)

    @cached_property
    def links(self) -> dict[str, float]:
        """For each link of the machine the seconds in which it serves at least one copy."""
        return breakdown.busy_links(self.solution)

    @cached_property
    def communication(self) -> float:
        """Seconds in which at least one copy between two places runs."""
        return breakdown.time_of_copies(self.solution)

    @cached_property
    def exposed_communication(self) -> float:
        """By how much the step would be shorter if copies between places took no time and occupied no link.

        The host costs the same in both.
        """
        return self.time - solve(self.recording, self.machine, are_copies_free=True).time

    @cached_property
    def overlap(self) -> float:
        """The part of `communication`, in percent, that the step does not wait for; 100 if nothing is copied.

        It is 0 also where the step waits for longer than links are busy. That happens where a copy that could start
        waits for its turn behind one that cannot yet.
        """
        if not self.communication:
            return 100.0
        return max(0.0, 100 * (1 - self.exposed_communication / self.communication))

    @cached_property
    def critical_path(self) -> list[Step]:
        """The chain of launches that makes the step as long as it is, from its beginning to its end."""
        return breakdown.critical_path(self.solution)

    @cached_property
    def waits(self) -> list[Wait]:
        """Waits that cost time, the longest first: for launches on other streams, and for links.

        A wait costs the time in which a launch has reached the device and its stream is free, but it does not start.
        """
        return breakdown.waits_by_cost(self.solution)

    @cached_property
    def grouped_waits(self) -> list[WaitGroup]:
        """`waits` of the same operators on the same streams together, the largest sum first."""
        return breakdown.grouped(self.waits, self.solution)

    @cached_property
    def threads(self) -> list[Thread]:
        """What each thread of the host does."""
        return breakdown.threads_of(self.solution)

    @cached_property
    def host_idle(self) -> float:
        """Seconds in which no thread of the host issues a launch."""
        spans = zip(self.solution.issue, self.solution.reached, strict=True)
        return self.time - length_of_union(spans)

    def summary(self) -> str:
        """A table: time of the step, communication, devices, streams, threads, longest waits, critical path."""
        parts = [_step(self), _devices(self), _streams(self), _links(self), _threads(self)]
        return "\n\n".join(part for part in (*parts, _waits(self), _critical_path(self)) if part) + "\n"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the schedule: a row for each thread of the host and for each stream.

        Args:
            path: the file. Its suffix says the format, such as ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            RuntimeError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise RuntimeError("plot draws with matplotlib, which is not installed: pip install matplotlib") from error
        rows = [*_rows_of_threads(self), *_rows_of_streams(self)]
        # Without pyplot: no window, and nothing that outlives the call.
        figure = Figure(figsize=(14, 1.6 + 0.28 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for position, (_, bars) in enumerate(rows):
            for color, spans in bars.items():
                is_wait = color == WAIT
                # Waits lie behind the launches and are lower, so that both are seen.
                low, height = (position - 0.15, 0.3) if is_wait else (position - 0.4, 0.8)
                axes.broken_barh(spans, (low, height), facecolors=color, linewidth=0, zorder=1 if is_wait else 2)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row is at the top
        axes.set_xlim(0, 1e3 * self.time or 1.0)
        axes.set_xlabel("ms")
        axes.set_title(f"A prediction for {self.machine.name}: {1e3 * self.time:.2f} ms", fontsize=10)
        handles = [Patch(color=color, label=label) for label, color in LEGEND.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(LEGEND), frameon=False, fontsize=8)
        figure.savefig(path, dpi=120)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the schedule for https://ui.perfetto.dev or ``chrome://tracing``, as JSON.

        A device is a process there and a stream is a thread of it. Arrows show waits.

        Args:
            path: the file, such as ``step.json``.
        """
        about = {"machine": self.machine.name, "times": "a prediction, not a measurement"}
        perfetto.write(path, [*_row_names(self), *_slices(self), *_arrows(self)], about)


def schedule(recording: Recording, machine: Machine) -> Schedule:
    """Computes when each launch would run.

    The host issues launches in the recorded order of each thread, at the cost that `machine.host` says, and waits where
    it has waited. A stream runs its launches in their order. A launch starts when it has reached the device, its stream
    is free, everything that it waits for has ended and, for a copy between two places, all links of its path are free.
    A kernel with peers begins like a copy and then moves one piece after the other, each when the links of its path are
    free for as long as it takes. The same recording on the same machine has the same schedule. Without such kernels it
    is not longer on a machine that is better in any respect.

    Raises:
        ValueError: if the recording uses more devices than the machine has, a dtype for which the machine has no rate,
            or contradicts itself.
    """
    return Schedule(solve(recording, machine))


def _step(result: Schedule) -> str:
    launches = result.recording.launches
    copies = sum(launch.copy is not None for launch in launches)
    exposed, time = result.exposed_communication, result.time
    in_graphs = len(launches) - result.recording.calls
    kernels = sum(bool(launch.peers) for launch in launches)
    with_peers = f", {kernels} of them kernels with peers" if kernels else ""
    by_host = f", by {result.recording.calls} calls of the host" if in_graphs else ""
    share = f"{100 * exposed / time if time else 0:.1f} % of the step"
    rows = [
        (
            "step",
            _ms(time),
            f"{len(launches)} launches, {copies} of them copies between two places{with_peers}{by_host}",
        ),
        ("any link is busy", _ms(result.communication), f"{result.overlap:.1f} % of it the step does not wait for"),
        ("exposed communication", _ms(exposed), share),
        ("no thread issues", _ms(result.host_idle), ""),
    ]
    title = f"A prediction for {result.machine.name}. Times are in ms."
    return f"{title}\n\n{aligned(rows, words={0, 2})}"


def _devices(result: Schedule) -> str:
    rows = [
        (
            str(device.name),
            str(device.launches),
            _ms(device.kernels),
            _ms(device.copies),
            _share(result, device.kernels),
        )
        for device in result.devices
    ]
    return aligned([("device", "launches", "kernels", "copies", "% kernels"), *rows])


def _streams(result: Schedule) -> str:
    found = [(result.recording.streams[at], result.streams[at]) for at in by_device(result.recording.streams)]
    rows = [
        (name_of_stream(name), str(busy.launches), _ms(busy.kernels), _ms(busy.copies))
        for name, busy in found
        if busy.launches
    ]
    return aligned([("stream", "launches", "kernels", "copies"), *rows])


def _links(result: Schedule) -> str:
    used = sorted(((seconds, link) for link, seconds in result.links.items() if seconds), reverse=True)
    rows = [(link, _ms(seconds), _share(result, seconds)) for seconds, link in used[:ROWS]]
    return aligned([(_first("link", used), "busy", "% busy"), *rows]) if used else ""


def _threads(result: Schedule) -> str:
    head = ("host thread", "launches", "issues", "waits for devices", "for other threads", "idle")
    rows = [
        (str(one.number), str(one.launches), *map(_ms, (one.seconds, one.for_devices, one.for_others, one.idle)))
        for one in result.threads
    ]
    return aligned([head, *rows])


def _waits(result: Schedule) -> str:
    groups = result.grouped_waits
    rows = [(_ms(group.seconds), str(group.count), *_ends(group)) for group in groups[:ROWS]]
    return aligned([("waits", "times", _first("launch", groups), "waits for"), *rows], words={2, 3}) if groups else ""


def _ends(group: WaitGroup) -> tuple[str, str]:
    one, other = (op.removeprefix("aten::") for op in (group.op, group.for_op))
    link = f"link {group.link}, which serves " if group.link else ""
    return f"{one} on {name_of_stream(group.stream)}", f"{link}{other} on {name_of_stream(group.for_stream)}"


def _critical_path(result: Schedule) -> str:
    """Where the time of the step goes: the critical path, summed by what its launches do and where."""
    launches, streams = result.recording.launches, result.recording.streams
    sums: dict[str, tuple[float, int]] = {}
    for step in result.critical_path:
        launch = launches[step.launch]
        if step.on == "host":
            what = f"host thread {launch.thread} issues"
        else:
            what = f"{name_of_launch(launch)} on {name_of_stream(streams[launch.stream])}"
        seconds, count = sums.get(what, (0.0, 0))
        sums[what] = (seconds + step.seconds, count + 1)
    largest = sorted(sums.items(), key=lambda item: -item[1][0])
    rows = [(_ms(seconds), _share(result, seconds), str(count), what) for what, (seconds, count) in largest[:ROWS]]
    head = ("ms", "%", "times", _first("on the critical path", largest))
    return aligned([head, *rows], words={3}) if rows else ""


def _first(what: str, found: Sequence[object]) -> str:
    return f"{what} (first {ROWS} of {len(found)})" if len(found) > ROWS else what


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _share(result: Schedule, seconds: float) -> str:
    return f"{100 * seconds / result.time if result.time else 0:.1f}"


KERNEL, COPY, WAIT, ISSUE = "#3b6fb6", "#e08b2c", "#d9d9d9", "#5d9b6b"
LEGEND = {"kernel": KERNEL, "copy between two places": COPY, "waits for a stream or a link": WAIT, "host issues": ISSUE}

Bars = list[tuple[float, float]]
"""Start and length of each bar, in milliseconds."""


def _rows_of_threads(result: Schedule) -> Iterable[tuple[str, dict[str, Bars]]]:
    solution = result.solution
    for thread in result.threads:
        spans = [
            _bar(solution.issue[launch.index], solution.reached[launch.index])
            for launch in result.recording.launches
            if launch.thread == thread.number
        ]
        yield f"host thread {thread.number}", {ISSUE: spans}


def _rows_of_streams(result: Schedule) -> Iterable[tuple[str, dict[str, Bars]]]:
    solution = result.solution
    rows: list[dict[str, Bars]] = [{WAIT: [], KERNEL: [], COPY: []} for _ in result.recording.streams]
    for launch in result.recording.launches:
        row = rows[launch.stream]
        ready, start, end = (times[launch.index] for times in (solution.ready, solution.start, solution.end))
        row[COPY if launch.communicates else KERNEL].append(_bar(start, end))
        if start > ready:
            row[WAIT].append(_bar(ready, start))
    for position in by_device(result.recording.streams):
        if result.streams[position].launches:
            yield name_of_stream(result.recording.streams[position]), rows[position]


def _bar(start: float, end: float) -> tuple[float, float]:
    return 1e3 * start, 1e3 * (end - start)


HOST_PROCESS = 0
"""The host comes first; the process of device i is 1 + i."""


def _row_names(result: Schedule) -> Iterator[Event]:
    """The names of processes and threads."""
    yield name("process_name", HOST_PROCESS, 0, "host")
    for thread in result.threads:
        yield name("thread_name", HOST_PROCESS, thread.number, f"host thread {thread.number}")
    for device in range(result.machine.devices):
        yield name("process_name", 1 + device, 0, f"device {device}")
    for position, stream in enumerate(result.recording.streams):
        yield name("thread_name", 1 + stream.device, position, name_of_stream(stream))


def _slices(result: Schedule) -> Iterator[Event]:
    """Each launch twice: where the host issues it, and where it runs."""
    solution = result.solution
    for launch in result.recording.launches:
        index, called = launch.index, name_of_launch(launch)
        about = {
            "launch": index,
            "bytes read": launch.bytes_read,
            "bytes written": launch.bytes_written,
            "FLOPs": launch.flops,
            "dtype": launch.dtype,
            "shapes": str([list(shape) for shape in launch.shapes]),
            "starts after": _words(result, index),
        }
        if launch.peers:
            about["peers"] = str([list(peer) for peer in launch.peers])
        if launch.stack:
            about["stack"] = launch.stack
        if launch.is_call:
            yield {
                "ph": "X", "cat": "issue", "name": called, "args": {"launch": index},
                **_host_row(result, index), **span(solution.issue[index], solution.reached[index]),
            }  # fmt: skip
        yield {
            "ph": "X", "cat": "copy" if launch.communicates else "kernel", "name": called, "args": about,
            **_device_row(result, index), **span(solution.start[index], solution.end[index]),
        }  # fmt: skip


def _words(result: Schedule, index: int) -> str:
    bound = result.solution.start_bound[index]
    if bound.kind == "host":
        return "the host has issued it"
    other = f"launch {bound.launch} ({name_of_launch(result.recording.launches[bound.launch])})"
    return f"link {bound.link} is free of {other}" if bound.link else f"{other}, by its {bound.kind}"


def _arrows(result: Schedule) -> Iterator[Event]:
    """An arrow for each wait of a stream, and for each wait of the host."""
    solution, number = result.solution, 0
    for launch in result.recording.launches:
        index = launch.index
        waits = [(other, "wait", _device_row(result, index), solution.start[index]) for other in launch.waits]
        waits += [(other, "host wait", _host_row(result, index), solution.issue[index]) for other in launch.host_waits]
        for other, kind, row, time in waits:
            number += 1
            about = {"cat": kind, "name": kind, "id": number}
            # Both events lie at the beginning of their slices, so that they belong to no other.
            yield {"ph": "s", **about, **_device_row(result, other), "ts": microseconds(solution.start[other])}
            yield {"ph": "f", "bp": "e", **about, **row, "ts": microseconds(time)}


def _host_row(result: Schedule, index: int) -> Event:
    return {"pid": HOST_PROCESS, "tid": result.recording.launches[index].thread}


def _device_row(result: Schedule, index: int) -> Event:
    stream = result.recording.launches[index].stream
    return {"pid": 1 + result.recording.streams[stream].device, "tid": stream}
