"""Intervals of time: their `union`, its length, and what is left of one `without` others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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


def without(interval: Interval, others: Iterable[Interval]) -> Iterator[Interval]:
    """What is left of the interval outside of the others, which lie inside of it."""
    at, end = interval
    for start, stop in union(others):
        yield at, start
        at = stop
    yield at, end
