"""The best split of a batch, computed from what each slot is expected to take. This file has no device and no clock.

A replica is expected to take a fixed time and a time for each of its samples. From that follows when the last one ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dataparallel.batches.chunk_sizes import split_by_shares

NEARLY = 1.05  # calls that are longer by this ratio are as good, where replicas wait for their turn
LEAST_SLOPE = 0.05  # part of a slot's time, at least, that is taken to grow with its samples
FAR = 1.2  # a ratio of sizes from which on their times tell what is fixed


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
    if permits >= len(seconds) and (groups is None or len({*groups}) == len(groups)):
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
    if permits >= len(start) and (groups is None or len({*groups}) == len(groups)):
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
