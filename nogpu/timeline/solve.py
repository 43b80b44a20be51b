"""When each launch of a recording is issued, starts and ends on a machine, and what bound it.

First how long launches take, then in which order the host issues them, then the times.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from itertools import islice
from typing import NamedTuple

from nogpu.timeline.intervals import Interval, slowed, union
from nogpu.timeline.launches import Launch, Recording
from nogpu.timeline.machine import Machine

ROUNDS = 50
"""How often, at most, times are computed again where kernels slow each other; they hardly change after a few."""


def durations(recording: Recording, machine: Machine) -> list[float]:
    """Seconds for each launch.

    A kernel takes the latency and the longer of computing and of reading and writing its memory (the roofline model:
    Williams, Waterman and Patterson, 2009). A copy takes the latency of its path and the time of its bytes. For a
    kernel with peers it is what its own memory takes at least, beside what it moves.

    Raises:
        ValueError: if a launch is on a device that the machine does not have, computes with a dtype for which it has no
            rate, or is a kernel that touches memory of a device that is no peer of its own.
    """
    for stream in recording.streams:
        _check_device(stream.device, machine)
    for launch in recording.launches:
        _check_peers(launch, recording.streams[launch.stream].device, machine)
    return [_copy(launch, machine) if launch.copy else _kernel(launch, machine) for launch in recording.launches]


def _check_device(device: int, machine: Machine) -> None:
    if not 0 <= device < machine.devices:
        raise ValueError(
            f"the recording uses device {device}, but {machine.name} has {machine.devices}: schedule it on a machine "
            f"with {device + 1} devices or more"
        )


def _check_peers(launch: Launch, device: int, machine: Machine) -> None:
    for source, target, _ in launch.peers:
        path = machine.wiring.paths.get((source, target))
        if launch.copy is not None or device not in (source, target) or path is None or not path.for_kernels:
            raise ValueError(
                f"launch {launch.index} ({launch.op}) moves bytes from {source} to {target} by a kernel on device "
                f"{device}: one end has to be that device, {machine.name} has to have both, and they have to be peers "
                "(Path.for_kernels)"
            )


def _copy(launch: Launch, machine: Machine) -> float:
    assert launch.copy is not None
    path = machine.wiring.paths.get(launch.copy)
    if path is None:
        raise ValueError(
            f"launch {launch.index} ({launch.op}) copies from {launch.copy[0]} to {launch.copy[1]}; {machine.name} has "
            f"devices 0 to {machine.devices - 1}, and -1 is the host"
        )
    # `item` writes no tensor of a device: what it reads is what it sends to the host.
    return path.latency + (launch.bytes_written or launch.bytes_read) / path.bandwidth


def _kernel(launch: Launch, machine: Machine) -> float:
    memory = (launch.bytes_read + launch.bytes_written) / machine.memory_bandwidth
    if launch.flops == 0:
        return _latency(launch, machine) + memory
    if launch.dtype not in machine.flops:
        raise ValueError(
            f"launch {launch.index} ({launch.op}) computes with {launch.dtype}, but {machine.name} has rates for "
            f"{[*machine.flops]} only: add one, machine.with_(flops={{..., {launch.dtype!r}: FLOPs per second}})"
        )
    return _latency(launch, machine) + max(launch.flops / machine.flops[launch.dtype], memory)


def _latency(launch: Launch, machine: Machine) -> float:
    """A kernel's, or that of a copy from the first peer."""
    return machine.wiring.paths[launch.peers[0][:2]].latency if launch.peers else machine.kernel_latency


def checked(recording: Recording) -> Recording:
    """The recording, if its launches are numbered, name streams that exist, and wait for earlier ones only.

    Raises:
        ValueError: otherwise. It names the launch.
    """
    for position, launch in enumerate(recording.launches):
        what = f"launch {position} ({launch.op})"
        if launch.index != position:
            raise ValueError(f"{what} has index {launch.index}: launches are numbered from 0 in their order")
        for stream in (launch.stream, launch.joins):
            if stream is not None and not 0 <= stream < len(recording.streams):
                raise ValueError(f"{what} names stream {stream}; the recording has {len(recording.streams)}")
        for name in ("waits", "host_waits", "issued_after"):
            if late := [other for other in getattr(launch, name) if not 0 <= other < position]:
                raise ValueError(f"{what} has {late} among its {name}: only launches before it can be there")
        graph = launch.graph
        if graph is not None and graph != position:
            first = recording.launches[graph] if 0 <= graph < position else None
            if first is None or (first.graph, first.thread) != (graph, launch.thread):
                raise ValueError(f"{what} is in the graph of launch {graph}, which does not begin one before it")
    return recording


def stream_before(recording: Recording) -> list[int | None]:
    """For each launch the one before on its stream."""
    last: dict[int, int] = {}
    before: list[int | None] = []
    for launch in recording.launches:
        before.append(last.get(launch.stream))
        last[launch.stream] = launch.index
    return before


def knows_issued(launch: Launch, before: int | None) -> Iterator[int]:
    """The launches that have been issued when this one is, whatever the machine; without those of its own thread."""
    yield from launch.issued_after
    yield from launch.waits
    if before is not None:
        yield before


def host_order(recording: Recording) -> list[int]:
    """Indices of all launches, in a fair merge of the threads.

    It is the order on a host where each call keeps its thread for one unit of time, where any number of threads issue
    at once, and where the devices take no time. Launches of one time come by index. A launch comes after all launches
    that it waits for.
    """
    free: dict[int, int] = {}
    times: list[int] = []
    for launch, before in zip(recording.launches, stream_before(recording), strict=True):
        time = free.get(launch.thread, 0)
        for other in (*knows_issued(launch, before), *launch.host_waits):
            time = max(time, times[other])
        times.append(time)
        free[launch.thread] = time + 1 if launch.is_call else time
    return sorted(range(len(times)), key=times.__getitem__)


class Move(NamedTuple):
    """Bytes on their way: those of a copy, or those that a kernel moves from or to one of its peers.

    Attributes:
        launch: its index.
        ends: the source and the target.
        start: when the links of the path are occupied.
        end: when they are free again.
    """

    launch: int
    ends: tuple[int, int]
    start: float
    end: float


class Bound(NamedTuple):
    """Why a launch is not issued, or does not start, earlier.

    Attributes:
        kind: what starts is bound by ``stream``, ``wait``, ``link`` or ``host`` (it has only just reached the device).
            What is issued is bound by ``thread`` (the launch before), ``lock`` (or a core, where Python has no lock),
            ``host wait``, ``order`` (another thread issues first) or ``begin`` (nothing).
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
        released: when the interpreter lock, or the core, is free again; when it was issued, for launches that hold
            none.
        reached: when it has reached the device, and its thread is free again.
        ready: when its stream is free and it has reached the device.
        start: when the device starts it.
        end: when the device has ended it.
        issue_bound: what bound `issue`.
        start_bound: what bound `start`.
        moves: what occupies links, and when.
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
    moves: list[Move]

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
    solution = _Solver(checked(recording), machine, are_copies_free, {}).solve()
    if not machine.beside_peer_kernels:
        return solution
    for _ in range(ROUNDS):  # what runs beside which kernel depends on what that slows
        before, beside = solution, defaultdict(list)
        for launch in recording.launches:
            if launch.peers:
                interval = before.start[launch.index], before.end[launch.index]
                beside[recording.streams[launch.stream].device].append(interval)
        unions = {device: union(intervals) for device, intervals in beside.items()}
        solution = _Solver(recording, machine, are_copies_free, unions).solve()
        if all(math.isclose(*ends, rel_tol=1e-9) for ends in zip(before.end, solution.end, strict=True)):
            break
    return solution


class _Solver:
    """The times that are known so far."""

    def __init__(
        self, recording: Recording, machine: Machine, are_copies_free: bool, beside: Mapping[int, Sequence[Interval]]
    ) -> None:
        self.recording, self.machine, self.are_copies_free = recording, machine, are_copies_free
        self.beside = beside  # for each device when kernels with peers run there
        self.moves: list[Move] = []
        # For each link when it is busy: ends and starts, in order. Only kernels with peers come in between.
        self.has_gaps = any(launch.peers for launch in recording.launches)
        self.busy: dict[str, list[Interval]] = {link: [] for link in machine.wiring.links}
        self.durations = durations(recording, machine)
        self.before = stream_before(recording)
        count = len(recording.launches)
        self.issue, self.released, self.reached, self.ready, self.start, self.end = ([0.0] * count for _ in range(6))
        self.issue_bound, self.start_bound = ([Bound("begin", -1)] * count for _ in range(2))
        self.last_of_thread: dict[int, int] = {}
        self.last_under_lock: int | None = None
        self.last_of_python: dict[int, int] = {}  # for each Python thread
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
            self.moves,
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
        if launch.is_call and not launch.in_backward:
            holder = self._holder(launch.thread)
            if holder is not None and self.released[holder] > time:
                time, bound = self.released[holder], Bound("lock", holder)
            self.last_under_lock = self.last_of_python[launch.thread] = index
        self.last_of_thread[launch.thread] = index
        locked, rest = self.machine.host.cost(launch)
        self.issue[index], self.issue_bound[index] = time, bound
        self.released[index] = time + locked
        self.reached[index] = time + locked + rest

    def _holder(self, thread: int) -> int | None:
        """The launch after which a Python thread can have the lock, or a core."""
        cores = self.machine.host.cores
        if cores is None:
            return self.last_under_lock
        others = [launch for other, launch in self.last_of_python.items() if other != thread]
        if len(others) < cores:
            return None
        return sorted(others, key=self.released.__getitem__)[-cores]

    def _run(self, launch: Launch) -> None:
        index = launch.index
        time, bound = self._ready(launch)
        if launch.communicates and self.are_copies_free:
            end = time
        elif launch.peers:
            end = self._piece_by_piece(launch, time)
        elif launch.copy is None:
            device = self.recording.streams[launch.stream].device
            factor = 1 + self.machine.beside_peer_kernels
            end = slowed(time, self.durations[index], self.beside.get(device, ()), factor)
        else:
            for link in self.machine.wiring.paths[launch.copy].links:
                latest = self.latest[link]
                if len(latest) == self.machine.wiring.links[link] and latest[0][0] > time:
                    time, bound = latest[0][0], Bound("link", latest[0][1], link)
            end = time + self.durations[index]
            self._move(launch, launch.copy, time, end)
        self.start[index], self.start_bound[index], self.end[index] = time, bound, end

    def _piece_by_piece(self, launch: Launch, start: float) -> float:
        """When the kernel has moved what it moves between its device and each of its peers in turn."""
        time = start + _latency(launch, self.machine)
        for source, target, nbytes in launch.peers:
            ends = source, target
            seconds = nbytes / (self.machine.wiring.paths[ends].bandwidth * self.machine.peer_kernels)
            time = self._gap(ends, time, seconds)
            self._move(launch, ends, time, time + seconds)
            time += seconds
        return max(time, start + self.durations[launch.index])

    def _gap(self, ends: tuple[int, int], time: float, seconds: float) -> float:
        """When the links are free for so long, not before ``time``: what is moved later may be scheduled already."""
        until: float | None = time
        while until is not None:
            time, until = until, None
            for link in self.machine.wiring.paths[ends].links:
                later = islice(self.busy[link], bisect_right(self.busy[link], (time, math.inf)), None)
                meets = [end for end, start in later if start < time + seconds]
                if len(meets) >= self.machine.wiring.links[link]:
                    until = meets[0]
        return time

    def _ready(self, launch: Launch) -> tuple[float, Bound]:
        """When the device can start it, but for links, and why not earlier."""
        index, before = launch.index, self.before[launch.index]
        # Of several that end at the same time, a launch on the device says more than the host.
        time, bound = self.reached[index], Bound("host", index)
        if before is not None and self.end[before] >= time:
            time, bound = self.end[before], Bound("stream", before)
        self.ready[index] = time
        for other in launch.waits:
            if self.end[other] > time or (self.end[other] == time and bound.kind == "host"):
                time, bound = self.end[other], Bound("wait", other)
        return time, bound

    def _move(self, launch: Launch, ends: tuple[int, int], start: float, end: float) -> None:
        """Occupies the links."""
        self.moves.append(Move(launch.index, ends, start, end))
        for link in self.machine.wiring.paths[ends].links:
            latest = self.latest[link]
            if len(latest) < self.machine.wiring.links[link]:
                heappush(latest, (end, launch.index))
            else:
                heappushpop(latest, (end, launch.index))
            if self.has_gaps:
                insort(self.busy[link], (end, start))
