"""What the threads of the host do in a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from dataparallel.testing.simulated.timeline.solve import Solution

__all__ = ["Thread", "threads_of"]


@dataclass(frozen=True)
class Thread:
    """A thread of the host.

    Attributes:
        number: its number in the recording.
        launches: how many launches it issues.
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
    return Thread(number, len(indices), seconds, for_devices, for_others, idle)
