"""Where the time of a schedule goes: busy streams, devices, links and threads, waits, and the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nogpu.timeline.intervals import Interval, length_of_union
from nogpu.timeline.launches import Launch, StreamName
from nogpu.timeline.solve import Bound, Solution


@dataclass(frozen=True)
class Busy:
    """What a device or one of its streams does.

    Attributes:
        name: the stream, or the index of the device.
        launches: how many launches its streams, or this stream, ran.
        kernels: seconds in which a kernel without peers runs.
        copies: seconds in which a copy or a kernel with peers runs: for a device those that it sends or receives, for a
            stream those that run on it.
    """

    name: StreamName | int
    launches: int
    kernels: float
    copies: float


def busy_streams(solution: Solution) -> list[Busy]:
    """For each stream of the recording, in its order."""
    found = []
    for position, name in enumerate(solution.recording.streams):
        own = [launch for launch in solution.recording.launches if launch.stream == position]
        found.append(Busy(name, len(own), *_kernels_and_copies(solution, own)))
    return found


def busy_devices(solution: Solution) -> list[Busy]:
    """For each device of the machine."""
    recording, found = solution.recording, []
    for device in range(solution.machine.devices):
        streams = {position for position, name in enumerate(recording.streams) if name.device == device}
        own = [launch for launch in recording.launches if launch.stream in streams]
        moved = [(move.start, move.end) for move in solution.moves if device in move.ends]
        found.append(Busy(device, len(own), *_kernels_and_copies(solution, own, moved)))
    return found


def _kernels_and_copies(
    solution: Solution, launches: list[Launch], moved: Sequence[Interval] = ()
) -> tuple[float, float]:
    spans: dict[bool, list[Interval]] = {False: [], True: [*moved]}
    for launch in launches:
        spans[launch.communicates].append((solution.start[launch.index], solution.end[launch.index]))
    return length_of_union(spans[False]), length_of_union(spans[True])


def busy_links(solution: Solution) -> dict[str, float]:
    """For each link of the machine the seconds in which it serves at least one copy."""
    spans: dict[str, list[tuple[float, float]]] = {link: [] for link in solution.machine.wiring.links}
    for move in solution.moves:
        for link in solution.machine.wiring.paths[move.ends].links:
            spans[link].append((move.start, move.end))
    return {link: length_of_union(found) for link, found in spans.items()}


def time_of_copies(solution: Solution) -> float:
    """Seconds in which any copy between two places runs, or a kernel with peers."""
    launches = solution.recording.launches
    return length_of_union((solution.start[one.index], solution.end[one.index]) for one in launches if one.communicates)


@dataclass(frozen=True)
class Thread:
    """A thread of the host.

    Attributes:
        number: its number in the recording.
        launches: how many launches it issues. A graph counts as one.
        seconds: how long it issues them.
        for_devices: seconds in which it waits for devices, such as in ``synchronize`` or ``item``.
        for_others: seconds in which it waits for the interpreter lock or for what another thread issues.
        idle: the rest of the step: before its first launch, unless it waits for a device, and after its last.
    """

    number: int
    launches: int
    seconds: float
    for_devices: float
    for_others: float
    idle: float


def threads_of(solution: Solution) -> list[Thread]:
    """Every thread of the recording, in its order."""
    by_thread: dict[int, list[int]] = {}
    for launch in solution.recording.launches:
        by_thread.setdefault(launch.thread, []).append(launch.index)
    return [_thread(solution, number, indices) for number, indices in sorted(by_thread.items())]


def _thread(solution: Solution, number: int, indices: list[int]) -> Thread:
    seconds = sum(solution.reached[index] - solution.issue[index] for index in indices)
    for_devices = for_others = free = 0.0
    for index in indices:
        gap = solution.issue[index] - free
        # What ended last has bound it. Before its first launch a thread need not have existed.
        if solution.issue_bound[index].kind == "host wait":
            for_devices += gap
        elif index != indices[0]:
            for_others += gap
        free = solution.reached[index]
    idle = max(0.0, solution.time - seconds - for_devices - for_others)
    calls = sum(solution.recording.launches[index].is_call for index in indices)
    return Thread(number, calls, seconds, for_devices, for_others, idle)


@dataclass(frozen=True)
class Wait:
    """One wait of one launch.

    Attributes:
        launch: the index of the launch that waits.
        waited_for: the index of the launch that it waits for: the one that ends last, or the copy that occupies the
            link.
        link: the link that it waits for, or an empty string.
        seconds: how long it waits.
    """

    launch: int
    waited_for: int
    link: str
    seconds: float


@dataclass(frozen=True)
class WaitGroup:
    """Waits of one operator on one stream for one operator on another, or for one link.

    Attributes:
        op: the operator that waits.
        stream: its stream.
        for_op: the operator that it waits for.
        for_stream: the stream of that one.
        link: the link that it waits for, or an empty string.
        count: how many waits these are.
        seconds: their sum. Streams wait at the same time, so sums may exceed the time of the step.
    """

    op: str
    stream: StreamName
    for_op: str
    for_stream: StreamName
    link: str
    count: int
    seconds: float


def waits_by_cost(solution: Solution) -> list[Wait]:
    """All waits that cost time, the longest first.

    A launch that waits for another and then for a link has two.
    """
    found = []
    for launch in solution.recording.launches:
        index, ready = launch.index, solution.ready[launch.index]
        if launch.waits:
            last = max(launch.waits, key=solution.end.__getitem__)
            if solution.end[last] > ready:
                found.append(Wait(index, last, "", solution.end[last] - ready))
                ready = solution.end[last]
        if solution.start[index] > ready:
            bound = solution.start_bound[index]
            found.append(Wait(index, bound.launch, bound.link, solution.start[index] - ready))
    return sorted(found, key=lambda wait: -wait.seconds)


def grouped(waits: Iterable[Wait], solution: Solution) -> list[WaitGroup]:
    """The waits, summed over pairs of operators and streams, the largest sum first."""
    launches, streams = solution.recording.launches, solution.recording.streams
    groups: dict[tuple[str, int, str, int, str], list[float]] = {}
    for wait in waits:
        one, other = launches[wait.launch], launches[wait.waited_for]
        groups.setdefault((one.op, one.stream, other.op, other.stream, wait.link), []).append(wait.seconds)
    found = [
        WaitGroup(op, streams[stream], for_op, streams[for_stream], link, len(seconds), sum(seconds))
        for (op, stream, for_op, for_stream, link), seconds in groups.items()
    ]
    return sorted(found, key=lambda group: -group.seconds)


@dataclass(frozen=True)
class Step:
    """A part of the critical path: a launch that runs on a device, or one that the host issues.

    Attributes:
        launch: its index.
        op: its operator.
        on: ``device`` if it runs, ``host`` if it is issued.
        start: in seconds from the beginning, where the step before ends.
        end: in seconds, where the next step starts.
        bound: why it does not begin earlier, as in `Bound`.
    """

    launch: int
    op: str
    on: str
    start: float
    end: float
    bound: Bound

    @property
    def seconds(self) -> float:
        """Its part of the time of the step."""
        return self.end - self.start


def critical_path(solution: Solution) -> list[Step]:
    """The steps in their order. Each starts where the one before ends, so together they take the whole time.

    Steps that take no time are left out.
    """
    if not solution.order:
        return []
    steps: list[Step] = []
    index = max(solution.order, key=solution.end.__getitem__)
    on, until = "device", solution.end[index]
    while index >= 0:
        if on == "device":
            start, bound = solution.start[index], solution.start_bound[index]
        else:
            start, bound = solution.issue[index], solution.issue_bound[index]
        if until > start:
            steps.append(Step(index, solution.recording.launches[index].op, on, start, until, bound))
        on = "device" if bound.kind in ("stream", "wait", "link", "host wait") else "host"
        index, until = bound.launch, start
    return steps[::-1]
