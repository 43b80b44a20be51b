"""What `counted` yields, for every front end: launches on each device, and bytes copied between them.

An extension counts all the time, for the whole process, and ``csrc/shared`` decides what a launch is. This file takes
the differences of two readings. ``simulated.counts`` and ``cuda.counts`` call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dataparallel.testing.indices import Device

__all__ = ["HOST", "Counts", "counting"]

HOST = -1

C = TypeVar("C", bound="Counts")


@contextmanager
def counting(counts: C) -> Iterator[C]:
    """Ends the counts with the block."""
    try:
        yield counts
    finally:
        counts.stop()


@dataclass(frozen=True)
class Reading:
    """Everything that has been counted in this process so far."""

    launches: list[int]  # by device, for as many as there can be
    copied: Counter[tuple[int, int]]


def _read(compiled: Any) -> Reading:
    launches, copied = compiled.read_counts()
    return Reading(launches, Counter({(origin, target): bytes_ for origin, target, bytes_ in copied}))


class Counts:
    """What has been counted since `counted` was entered, until its end or, inside the block, until now.

    An operator counts when it is complete on the host. Operators of other threads have counted once these threads are
    known to be done: after a join, or after ``backward()`` has returned.

    Args:
        compiled: the compiled module of the devices.
        devices: how many devices there are.
        index_of: returns the index of a device, and raises for what is none.
    """

    def __init__(self, compiled: Any, devices: int, index_of: Callable[[Device], int]) -> None:
        self._compiled = compiled
        self._devices = devices
        self._index_of = index_of
        self._start = _read(compiled)
        self._end: Reading | None = None

    def stop(self) -> None:
        """Called at the end of the block: the counts stay as they are."""
        self._end = _read(self._compiled)

    def _until(self) -> Reading:
        return _read(self._compiled) if self._end is None else self._end

    @property
    def launches(self) -> list[int]:
        """Launches on each device, by its index."""
        pairs = zip(self._until().launches, self._start.launches, strict=True)
        return [now - before for now, before in pairs][: self._devices]

    @property
    def copied(self) -> Counter[tuple[int, int]]:
        """Bytes from one device to another, by their two indices; -1 is the host. Pairs without bytes are left out."""
        return self._until().copied - self._start.copied

    def sent(self, device: Device) -> int:
        """Bytes from this device to all other devices, without the host."""
        index = self._index_of(device)
        return sum(count for (origin, target), count in self.copied.items() if origin == index and target != HOST)

    def received(self, device: Device) -> int:
        """Bytes from all other devices to this one, without the host."""
        index = self._index_of(device)
        return sum(count for (origin, target), count in self.copied.items() if target == index and origin != HOST)
