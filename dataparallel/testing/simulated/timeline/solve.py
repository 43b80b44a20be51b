"""When each launch is issued, starts and ends, and what bound it: one pass over the launches in host order.

Every time is the maximum of earlier times, plus a cost. The order in which the lock and the links serve is fixed (see
``order``). Therefore no time becomes later if a cost becomes smaller or a rate larger. Systems of this kind are called
max-plus: Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import NamedTuple

from dataparallel.testing.simulated.timeline.costs import durations
from dataparallel.testing.simulated.timeline.launches import Launch, Recording
from dataparallel.testing.simulated.timeline.machine import Machine
from dataparallel.testing.simulated.timeline.order import checked, host_order, knows_issued, stream_before

__all__ = ["Bound", "Solution", "solve"]


class Bound(NamedTuple):
    """Why a launch is not issued, or does not start, earlier.

    Attributes:
        kind: what starts is bound by ``stream``, ``wait``, ``link`` or ``host`` (it has only just reached the device).
            What is issued is bound by ``thread`` (the launch before), ``lock``, ``host wait``, ``order`` (another
            thread issues first) or ``begin`` (nothing).
        launch: the launch that ended, or was issued, at that time. For ``host`` it is the launch itself, for ``begin``
            -1.
        link: the link, for ``link``.
    """

    kind: str
    launch: int
    link: str = ""


@dataclass(frozen=True)
class Solution:
    """The times of each launch, in seconds from the beginning, by its index.

    Attributes:
        recording: what was scheduled.
        machine: where.
        order: the host order.
        issue: when the host begins to issue it.
        released: when the interpreter lock is free again; when it was issued, for launches that hold no lock.
        reached: when it has reached the device, and its thread is free again.
        ready: when its stream is free and it has reached the device.
        start: when the device starts it.
        end: when the device has ended it.
        issue_bound: what bound `issue`.
        start_bound: what bound `start`.
    """

    recording: Recording
    machine: Machine
    order: list[int]
    issue: list[float]
    released: list[float]
    reached: list[float]
    ready: list[float]
    start: list[float]
    end: list[float]
    issue_bound: list[Bound]
    start_bound: list[Bound]

    @property
    def time(self) -> float:
        """Seconds until the last launch has ended."""
        return max(self.end, default=0.0)


def solve(recording: Recording, machine: Machine, *, are_copies_free: bool = False) -> Solution:
    """Computes all times.

    Args:
        recording: the launches.
        machine: where they run.
        are_copies_free: copies between places take no time and occupy no link.

    Raises:
        ValueError: if the recording contradicts itself, or the machine lacks a device or a rate that it needs.
    """
    return _Solver(checked(recording), machine, are_copies_free).solve()


class _Solver:
    """The times that are known so far."""

    def __init__(self, recording: Recording, machine: Machine, are_copies_free: bool) -> None:
        self.recording, self.machine, self.are_copies_free = recording, machine, are_copies_free
        self.durations = durations(recording, machine)
        self.before = stream_before(recording)
        count = len(recording.launches)
        self.issue, self.released, self.reached, self.ready, self.start, self.end = ([0.0] * count for _ in range(6))
        self.issue_bound, self.start_bound = ([Bound("begin", -1)] * count for _ in range(2))
        self.last_of_thread: dict[int, int] = {}
        self.last_under_lock: int | None = None
        # For each link the latest ends, as many as it serves at a time, the first of them on top.
        self.latest: dict[str, list[tuple[float, int]]] = {link: [] for link in machine.wiring.links}

    def solve(self) -> Solution:
        order = host_order(self.recording)
        for index in order:
            launch = self.recording.launches[index]
            self._issue(launch)
            self._run(launch)
        return Solution(
            self.recording,
            self.machine,
            order,
            self.issue,
            self.released,
            self.reached,
            self.ready,
            self.start,
            self.end,
            self.issue_bound,
            self.start_bound,
        )

    def _issue(self, launch: Launch) -> None:
        index = launch.index
        time, bound = 0.0, Bound("begin", -1)
        for other in launch.host_waits:
            if self.end[other] > time:
                time, bound = self.end[other], Bound("host wait", other)
        for other in knows_issued(launch, self.before[index]):
            if self.issue[other] > time:
                time, bound = self.issue[other], Bound("order", other)
        own = self.last_of_thread.get(launch.thread)
        if own is not None and self.reached[own] > time:
            time, bound = self.reached[own], Bound("thread", own)
        if not launch.in_backward:
            holder = self.last_under_lock
            if holder is not None and self.released[holder] > time:
                time, bound = self.released[holder], Bound("lock", holder)
            self.last_under_lock = index
        self.last_of_thread[launch.thread] = index
        locked, rest = self.machine.host.cost(launch)
        self.issue[index], self.issue_bound[index] = time, bound
        self.released[index] = time + locked
        self.reached[index] = time + locked + rest

    def _run(self, launch: Launch) -> None:
        index, before = launch.index, self.before[launch.index]
        # Of several that end at the same time, a launch on the device says more than the host.
        time, bound = self.reached[index], Bound("host", index)
        if before is not None and self.end[before] >= time:
            time, bound = self.end[before], Bound("stream", before)
        self.ready[index] = time
        for other in launch.waits:
            if self.end[other] > time or (self.end[other] == time and bound.kind == "host"):
                time, bound = self.end[other], Bound("wait", other)
        is_free = launch.copy is not None and self.are_copies_free
        links = () if launch.copy is None or is_free else self.machine.wiring.paths[launch.copy].links
        for link in links:
            latest = self.latest[link]
            if len(latest) == self.machine.wiring.links[link] and latest[0][0] > time:
                time, bound = latest[0][0], Bound("link", latest[0][1], link)
        end = time if is_free else time + self.durations[index]
        self.start[index], self.start_bound[index], self.end[index] = time, bound, end
        for link in links:
            latest = self.latest[link]
            if len(latest) < self.machine.wiring.links[link]:
                heappush(latest, (end, index))
            else:
                heapreplace(latest, (end, index))
