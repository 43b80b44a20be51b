"""What each slot of a call takes, in time and memory, and the best split of a batch that follows.

The time of a slot is wall time in the thread that runs the replica, from when it has a permit until its device has
finished, without waits for other replicas. Only measured calls wait for devices. Memory is estimated: a forward is
known by what it leaves on a device, and a backward not at all.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dataparallel.batches.chunk_sizes import split_by_shares
from dataparallel.batches.structures import tensors_in
from dataparallel.comm.streams.current import current_streams
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child

T = TypeVar("T")

USABLE = 0.75  # part of the free memory that a forward may fill: gradients and the gathered output need the rest
NEARLY = 1.05  # calls that are longer by this ratio are as good, where replicas wait for their turn
LEAST_SLOPE = 0.05  # part of a slot's time, at least, that is taken to grow with its samples
FAR = 1.2  # a ratio of sizes from which on their times tell what is fixed


class _Waited(threading.local):
    """Seconds for which the replica of this thread has waited for others."""

    seconds = 0.0


_waited = _Waited()


@contextmanager
def waiting() -> Iterator[None]:
    """Around each wait of a replica for other replicas of its call."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _waited.seconds += time.perf_counter() - start


class SlotTimes:
    """The measurements of one call with replicas on ``slots``.

    Attributes:
        seconds: for each slot; those that have not ended are missing.
        span: seconds from the start until the last replica had ended.
        free: bytes that a tensor could have on each accelerator before the call, where that is known.
        taken: bytes of the inputs on each accelerator, and those by which the forward has filled it, where that is
            known: at its peak, if that was the highest ever, or else at its end.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = tuple(slots)
        self.seconds: dict[int, float] = {}
        self.span = 0.0
        self.free: dict[torch.device, int] = {}
        self.taken: dict[torch.device, int] = {}
        self._before: dict[torch.device, tuple[int, int]] = {}
        self._start = 0.0

    def begin_call(self, streams: Iterable[torch.Stream], inputs: Iterable[Any]) -> None:
        """Waits for what ``streams`` still do, which is no work of this call. ``inputs``: those of each replica."""
        for stream in streams:
            stream.synchronize()
        for device in {*self.slots} - {CPU}:
            free = free_bytes(device)
            if free is not None:
                self.free[device], self.taken[device] = free, 0
                allocated, peak = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
                self._before[device] = allocated(device), peak(device)
        for tensor in {id(tensor): tensor for each in inputs for tensor in tensors_in(each)}.values():
            if tensor.device in self.taken and tensor.layout == torch.strided and not tensor.is_nested:
                self.taken[tensor.device] += tensor.nbytes
        self._start = time.perf_counter()

    def run_replica(self, slot: int, task: Callable[[], T]) -> T:
        """Runs a replica, in its thread and with its streams current, and waits for its device."""
        outside, _waited.seconds = _waited.seconds, 0.0  # of a replica around this one, if there is any
        start = time.perf_counter()
        try:
            value = task()
            for stream in current_streams([self.slots[slot]]).values():
                stream.synchronize()
            end = time.perf_counter()
            self.seconds[slot] = max(0.0, end - start - _waited.seconds)
            self.span = max(self.span, end - self._start)
            return value
        finally:
            _waited.seconds = outside

    def end_call(self) -> None:
        """Notes what the replicas have left in memory."""
        for device, (allocated, peak) in self._before.items():
            highest = torch.accelerator.max_memory_allocated(device)
            now = torch.accelerator.memory_allocated(device)
            self.taken[device] += (highest if highest > peak else now) - allocated


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A child that is forked inside a replica does not run that replica."""
    _waited.seconds = 0.0


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a tensor could have: what the device has, and what torch's allocator has of it without using it.

    ``None`` if the backend does not tell.
    """
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # such a backend does not count, or has no limit
        return None


def samples_that_fit(
    slots: Sequence[torch.device],
    chunks: Sequence[int],
    free: Mapping[torch.device, int],
    taken: Mapping[torch.device, int],
) -> tuple[float, ...]:
    """For each slot the samples that its device has memory for; infinite where that is not known.

    Slots on one device share it. ``free`` were the bytes before a call in which the forward of ``chunks`` has ``taken``
    some.
    """
    most = [math.inf] * len(slots)
    for device, bytes_taken in taken.items():
        here = [slot for slot, other in enumerate(slots) if other == device]
        if bytes_taken > 0:
            room = USABLE * free[device] * sum(chunks[slot] for slot in here) / bytes_taken
            for slot in here:
                most[slot] = math.floor(room / len(here))
    return tuple(most)


def shares_by_memory(slots: Sequence[torch.device]) -> tuple[float, ...]:
    """Shares before anything is measured: equal, but less where less than half of the largest free memory is free."""
    free = {device: free_bytes(device) for device in {*slots} - {CPU}}
    known = [(free.get(slot) or 0) / slots.count(slot) for slot in slots]
    if None in free.values() or not any(known):
        return (1.0,) * len(slots)
    return tuple(min(1.0, max(2 * each / max(known), 1e-3)) for each in known)


# ---- the best split: a replica is expected to take a fixed time, and a time for each of its samples ------------------


@dataclass(frozen=True)
class Cost:
    """Seconds of a slot: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def of(self, samples: int) -> float:
        """Seconds with so many samples."""
        return self.fixed + self.per_sample * samples


def fit(points: Sequence[tuple[float, float]]) -> Cost:
    """The cost of a slot from points of samples and seconds: least squares, if sizes differ enough.

    Else all of the time is taken to grow with the samples. Neither part is ever below 0.
    """
    x = sum(samples for samples, _ in points) / len(points)
    y = max(sum(seconds for _, seconds in points) / len(points), 1e-9)
    slope = y / x
    if max(samples for samples, _ in points) >= FAR * min(samples for samples, _ in points):
        spread = sum((samples - x) ** 2 for samples, _ in points)
        measured = sum((samples - x) * (seconds - y) for samples, seconds in points) / spread
        slope = min(slope, max(measured, LEAST_SLOPE * slope))
    return Cost(y - slope * x, slope)


def predicted(seconds: Sequence[float], permits: int, groups: Sequence[Hashable | None] | None = None) -> float:
    """Seconds until the last of the replicas ends, which run as the tasks of a `gang.Gang` do."""
    if _run_all_at_once(len(seconds), permits, groups):
        return max(seconds)
    if permits == 1:
        return sum(seconds)
    keys: Sequence[Hashable | None] = [None] * len(seconds) if groups is None else groups
    waiting, running, now = list(range(len(seconds))), list[tuple[float, int]](), 0.0
    while waiting or running:
        for slot in [*waiting]:
            busy = {keys[other] for _, other in running} - {None}
            if len(running) < permits and keys[slot] not in busy:
                waiting.remove(slot)
                heapq.heappush(running, (now + seconds[slot], slot))
        now, _ = heapq.heappop(running)
    return now


def _run_all_at_once(count: int, permits: int, groups: Sequence[Hashable | None] | None) -> bool:
    return permits >= count and (groups is None or len({*groups}) == count)


def search(
    costs: Sequence[Cost],
    start: Sequence[int],
    permits: int,
    groups: Sequence[Hashable | None] | None = None,
    most: Sequence[float] | None = None,
) -> list[int]:
    """The split of as many samples as ``start`` has for which the call is expected to be shortest.

    Where replicas wait for their turn, many splits are nearly as fast. Then it is the most even one of them: costs are
    measured, and small differences mean nothing. A slot keeps at least one sample, and gets no more than ``most`` says,
    if the samples fit at all.
    """
    limits = [math.inf] * len(start) if most is None else list(most)

    def call(sizes: Sequence[int]) -> tuple[float, list[float]]:
        seconds = [cost.of(size) for cost, size in zip(costs, sizes, strict=True)]
        # Of calls that are as long, that with the shorter longest replica is on the way to a shorter one.
        return float(f"{predicted(seconds, permits, groups):.9g}"), sorted(seconds, reverse=True)

    fastest = _climb(within(start, limits), limits, call)
    if _run_all_at_once(len(start), permits, groups):
        return fastest
    longest = NEARLY * call(fastest)[0]

    def unevenness(sizes: Sequence[int]) -> tuple[float, list[float]]:
        seconds, of_slots = call(sizes)
        return (0.0 if seconds <= longest else 1.0), of_slots

    return _climb(fastest, limits, unevenness)


def _climb(sizes: list[int], limits: Sequence[float], loss: Callable[[Sequence[int]], Any]) -> list[int]:
    """Moves samples from slot to slot while ``loss`` falls: many at first, then fewer, in the end one by one."""
    best, step = loss(sizes), max(1, sum(sizes) // 2)
    while step:
        found = None
        for source in range(len(sizes)):
            for target in range(len(sizes)):
                if source == target or sizes[source] - step < 1 or sizes[target] + step > limits[target]:
                    continue
                moved = [*sizes]
                moved[source] -= step
                moved[target] += step
                now = loss(moved)
                if now < best:
                    found, best = moved, now
        if found is None:
            step //= 2
        else:
            sizes = found
    return sizes


def within(sizes: Sequence[int], most: Sequence[float]) -> list[int]:
    """``sizes``, with what is above ``most`` moved to the slots that have the most room; at least 1 is left to each.

    If all slots together have too little room, they share the samples in the ratio of ``most``.
    """
    limits = [max(1, limit) for limit in most]
    found, total = list(sizes), sum(sizes)
    if sum(limits) < total:
        return split_by_shares(total, limits)
    while over := [slot for slot, size in enumerate(found) if size > limits[slot]]:
        fullest = max(over, key=lambda slot: found[slot] - limits[slot])
        roomiest = max(range(len(found)), key=lambda slot: (limits[slot] - found[slot], -found[slot], -slot))
        found[fullest] -= 1
        found[roomiest] += 1
    return found
