"""Intervals of time: `union`, how much of one is `covered` by others, work that is `slowed` in them, and `parents`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

Interval = tuple[float, float]
"""Beginning and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length_of_union(intervals: Iterable[Interval]) -> float:
    """For how long at least one of the intervals lasts."""
    return sum([end - start for start, end in union(intervals)])


def covered(interval: Interval, by: Sequence[Interval]) -> float:
    """How much of ``interval`` is covered by intervals that are disjoint and in order."""
    start, end = interval
    return sum([min(end, b) - max(start, a) for a, b in _overlapping(start, end, by)])


def slowed(start: float, seconds: float, by: Sequence[Interval], factor: float) -> float:
    """When work of so many seconds ends that takes ``factor`` times as long in intervals, disjoint and in order."""
    time = start
    for a, b in _overlapping(start, float("inf"), by):
        before = max(a - time, 0.0)
        if before >= seconds:
            break
        time, seconds = max(a, time), seconds - before
        if factor * seconds <= b - time:
            return time + factor * seconds
        time, seconds = b, seconds - (b - time) / factor
    return time + seconds


def _overlapping(start: float, end: float, by: Sequence[Interval]) -> Iterator[Interval]:
    for a, b in islice(by, max(0, bisect_left(by, (start,)) - 1), None):
        if a >= end:
            return
        if b > start:
            yield a, b


def parents(intervals: Sequence[Interval]) -> list[int | None]:
    """For each interval of one thread the position of the smallest interval that contains it.

    One thread's ranges are nested: any two are disjoint, or one contains the other. Of two equal ones the later one in
    the list is the outer one, because a thread ends inner ranges first.
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1], -i))
    found: list[int | None] = [None] * len(intervals)
    around: list[int] = []
    for i in order:
        start, end = intervals[i]
        while around and (intervals[around[-1]][1] <= start < end or intervals[around[-1]][1] < end):
            around.pop()
        found[i] = around[-1] if around else None
        around.append(i)
    return found
