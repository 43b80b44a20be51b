"""`SlotTimes` measures the time and memory of each slot in a call, and `search` finds the best split of a batch.

The time of a slot is wall time in the replica's thread, from when the replica has a permit until its device has
finished, without waits for other replicas. Only measured calls wait for devices. Memory is estimated from what a
forward leaves on a device. The memory of a backward is not known.
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
from dataparallel.comm.buckets import has_strides
from dataparallel.comm.streams.current import current_streams
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child

T = TypeVar("T")

USABLE = 0.75  # a forward may fill this share of the free memory: gradients and the gathered output need the rest
NEARLY = 1.05  # if replicas take turns, a call counts as equally fast up to this ratio
LEAST_SLOPE = 0.05  # at least this share of a slot's time is assumed to grow with its samples
FAR = 1.2  # sizes have to differ by this ratio, or times do not tell the fixed cost


class _Waited(threading.local):
    """Seconds for which the replica in this thread has waited for other replicas."""

    seconds = 0.0


_waited = _Waited()


@contextmanager
def waiting() -> Iterator[None]:
    """A context around each wait of a replica for other replicas of its call. `SlotTimes` subtracts the wait."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _waited.seconds += time.perf_counter() - start


class SlotTimes:
    """The measurements of one call with replicas on ``slots``.

    Attributes:
        seconds: the time of each slot; slots whose replicas have not ended are missing.
        span: seconds from the start until the last replica ended; 0 until `end_call`.
        free: free bytes on each accelerator before the call. Backends that do not count memory are missing.
        taken: on each accelerator the bytes of the inputs, and the bytes that the forward has added: at its peak, if
            that was the highest ever, or else at its end. The same backends are missing.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = tuple(slots)
        self.seconds: dict[int, float] = {}
        self.span = 0.0
        self._ends: dict[int, float] = {}
        self.free: dict[torch.device, int] = {}
        self.taken: dict[torch.device, int] = {}
        self._before: dict[torch.device, tuple[int, int]] = {}
        self._start = 0.0

    def begin_call(self, streams: Iterable[torch.Stream], inputs: Iterable[Any]) -> None:
        """Waits for earlier work on ``streams``, and notes the memory before the call. ``inputs``: of each replica."""
        for stream in streams:
            stream.synchronize()
        for device in {*self.slots} - {CPU}:
            free = free_bytes(device)
            if free is not None:
                self.free[device], self.taken[device] = free, 0
                allocated, peak = torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated
                self._before[device] = allocated(device), peak(device)
        for tensor in {id(tensor): tensor for each in inputs for tensor in tensors_in(each)}.values():
            if tensor.device in self.taken and has_strides(tensor):
                self.taken[tensor.device] += tensor.nbytes
        self._start = time.perf_counter()

    def run_replica(self, slot: int, task: Callable[[], T]) -> T:
        """Runs a replica, in its thread and with its streams current, and waits for its device."""
        outer_seconds, _waited.seconds = _waited.seconds, 0.0  # a replica of an outer call may run in this thread
        start = time.perf_counter()
        try:
            value = task()
            for stream in current_streams([self.slots[slot]]).values():
                stream.synchronize()
            self._ends[slot] = end = time.perf_counter()
            self.seconds[slot] = max(0.0, end - start - _waited.seconds)
            return value
        finally:
            _waited.seconds = outer_seconds

    def end_call(self) -> None:
        """Notes when the last replica ended, and how much memory all have added."""
        self.span = max(self._ends.values(), default=self._start) - self._start
        for device, (allocated, peak) in self._before.items():
            highest = torch.accelerator.max_memory_allocated(device)
            now = torch.accelerator.memory_allocated(device)
            self.taken[device] += (highest if highest > peak else now) - allocated


@in_forked_child
def _start_afresh_after_fork() -> None:
    """A child that is forked inside a replica does not run that replica."""
    _waited.seconds = 0.0


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that a tensor could have: free memory of the device, and unused memory of torch's allocator.

    Returns ``None`` if the backend does not tell.
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
    """Returns for each slot how many samples its device has memory for; infinite where that is not known.

    Slots on one device share its memory. In a measured call ``free`` bytes were free before, and the forward of
    ``chunks`` has taken ``taken`` bytes.
    """
    limits = [math.inf] * len(slots)
    for device, bytes_taken in taken.items():
        device_slots = [slot for slot, other in enumerate(slots) if other == device]
        if bytes_taken > 0:
            samples = USABLE * free[device] * sum(chunks[slot] for slot in device_slots) / bytes_taken
            for slot in device_slots:
                limits[slot] = math.floor(samples / len(device_slots))
    return tuple(limits)


def shares_by_memory(slots: Sequence[torch.device]) -> tuple[float, ...]:
    """Returns shares before anything is measured: equal, but smaller for slots with less than half the most memory."""
    free = {device: free_bytes(device) for device in {*slots} - {CPU}}
    free_of_slots = [(free.get(slot) or 0) / slots.count(slot) for slot in slots]
    if None in free.values() or not any(free_of_slots):
        return (1.0,) * len(slots)
    return tuple(min(1.0, max(2 * each / max(free_of_slots), 1e-3)) for each in free_of_slots)


# ---- the best split, by a model of the cost: a fixed time for a replica, and a time for each of its samples ----------


@dataclass(frozen=True)
class Cost:
    """Seconds of a slot: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def of(self, samples: int) -> float:
        """Returns the seconds for so many samples."""
        return self.fixed + self.per_sample * samples


def fit(points: Sequence[tuple[float, float]]) -> Cost:
    """Fits the cost of a slot to points (samples, seconds) by least squares.

    If sizes do not differ enough, ``fixed`` is 0. ``fixed`` and ``per_sample`` are never negative.
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
    """Returns the seconds until the last replica ends, if replicas run as the tasks of a `gang.Gang`."""
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
    """Returns the split of ``sum(start)`` samples for which the predicted time of the call is shortest.

    If replicas take turns, many splits are nearly equally fast. Then the result is the most even one of these splits,
    because small differences between measured costs mean nothing. A slot keeps at least one sample, and gets no more
    than ``most`` says if the samples fit at all.
    """
    limits = [math.inf] * len(start) if most is None else list(most)

    def call(sizes: Sequence[int]) -> tuple[float, list[float]]:
        seconds = [cost.of(size) for cost, size in zip(costs, sizes, strict=True)]
        # Of equally long calls, the one with the shorter longest replica is nearer to a shorter call.
        return float(f"{predicted(seconds, permits, groups):.9g}"), sorted(seconds, reverse=True)

    fastest = _climb(within(start, limits), limits, call)
    if _run_all_at_once(len(start), permits, groups):
        return fastest
    longest = NEARLY * call(fastest)[0]

    def unevenness(sizes: Sequence[int]) -> tuple[float, list[float]]:
        seconds, slot_seconds = call(sizes)
        return (0.0 if seconds <= longest else 1.0), slot_seconds

    return _climb(fastest, limits, unevenness)


def _climb(sizes: list[int], limits: Sequence[float], loss: Callable[[Sequence[int]], Any]) -> list[int]:
    """Moves samples from slot to slot as long as ``loss`` falls: half of them at first, in the end one by one."""
    best, step = loss(sizes), max(1, sum(sizes) // 2)
    while step:
        better = None
        for source in range(len(sizes)):
            for target in range(len(sizes)):
                if source == target or sizes[source] - step < 1 or sizes[target] + step > limits[target]:
                    continue
                moved = [*sizes]
                moved[source] -= step
                moved[target] += step
                value = loss(moved)
                if value < best:
                    better, best = moved, value
        if better is None:
            step //= 2
        else:
            sizes = better
    return sizes


def within(sizes: Sequence[int], most: Sequence[float]) -> list[int]:
    """Returns ``sizes``, with samples above ``most`` moved to the slots with the most room. Each slot keeps at least 1.

    If the samples do not fit, the slots share them in the ratio of ``most``.
    """
    limits = [max(1, limit) for limit in most]
    result, total = list(sizes), sum(sizes)
    if sum(limits) < total:
        return split_by_shares(total, limits)
    while over := [slot for slot, size in enumerate(result) if size > limits[slot]]:
        fullest = max(over, key=lambda slot: result[slot] - limits[slot])
        roomiest = max(range(len(result)), key=lambda slot: (limits[slot] - result[slot], -result[slot], -slot))
        result[fullest] -= 1
        result[roomiest] += 1
    return result
