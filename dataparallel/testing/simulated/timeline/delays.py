"""What each wait costs: launches that start later than their stream is free and the host has issued them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dataparallel.testing.simulated.timeline.launches import StreamName
from dataparallel.testing.simulated.timeline.solve import Solution

__all__ = ["Wait", "WaitGroup", "grouped", "waits_by_cost"]


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
