"""For how long streams, devices and links are occupied: unions of the times of launches."""

from __future__ import annotations

from dataclasses import dataclass

from dataparallel.testing.simulated.timeline.launches import Launch, StreamName
from dataparallel.testing.simulated.timeline.solve import Solution
from dataparallel.tracing.intervals import length_of_union

__all__ = ["Busy", "busy_devices", "busy_links", "busy_streams", "time_of_copies"]


@dataclass(frozen=True)
class Busy:
    """What a device or one of its streams does.

    Attributes:
        name: the stream, or the index of the device.
        launches: how many launches its streams, or this stream, ran.
        kernels: seconds in which a kernel runs.
        copies: seconds in which a copy runs: for a device those that it sends or receives, for a stream those that run
            on it.
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
        received = [one for one in recording.launches if one.copy and device in one.copy and one.stream not in streams]
        found.append(Busy(device, len(own), *_kernels_and_copies(solution, [*own, *received])))
    return found


def _kernels_and_copies(solution: Solution, launches: list[Launch]) -> tuple[float, float]:
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for launch in launches:
        spans[launch.copy is not None].append((solution.start[launch.index], solution.end[launch.index]))
    return length_of_union(spans[False]), length_of_union(spans[True])


def busy_links(solution: Solution) -> dict[str, float]:
    """For each link of the machine the seconds in which it serves at least one copy."""
    spans: dict[str, list[tuple[float, float]]] = {link: [] for link in solution.machine.wiring.links}
    for launch in solution.recording.launches:
        for link in solution.machine.wiring.paths[launch.copy].links if launch.copy else ():
            spans[link].append((solution.start[launch.index], solution.end[launch.index]))
    return {link: length_of_union(found) for link, found in spans.items()}


def time_of_copies(solution: Solution) -> float:
    """Seconds in which any copy between two places runs."""
    launches = solution.recording.launches
    return length_of_union((solution.start[one.index], solution.end[one.index]) for one in launches if one.copy)
