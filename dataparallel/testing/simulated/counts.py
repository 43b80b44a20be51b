"""What `torch.sim.counted` counts: launches, and bytes copied between devices.

For tests of what a program asks of the devices, where time says nothing. The extension counts always, for the whole
process; here differences of its numbers are taken. It knows no operator: what a launch is, ``csrc`` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Device: TypeAlias = "torch.device | str | int | None"

HOST = -1


@dataclass(frozen=True)
class Reading:
    """All that has been counted in this process so far."""

    launches: list[int]  # of every device that there may ever be
    copied: Counter[tuple[int, int]]


class Counts:
    """What has been counted from the start of `torch.sim.counted` to its end, or until now where it has not ended.

    Work counts when its operator is over on the host. That of other threads does so before what shows that they are
    done: a join, or the end of ``backward()``.
    """

    def __init__(self, extension: Any, index: Callable[[Device], int]) -> None:
        self._extension = extension
        self._index = index
        self._end: Reading | None = None
        self._start = self._read()

    def _read(self) -> Reading:
        launches, copied = self._extension.read_counts()
        return Reading(launches, Counter({(origin, target): bytes_ for origin, target, bytes_ in copied}))

    def _stop(self) -> None:
        self._end = self._read()

    def _until(self) -> Reading:
        return self._read() if self._end is None else self._end

    @property
    def launches(self) -> list[int]:
        """Launches on each device, by its index."""
        pairs = zip(self._until().launches, self._start.launches, strict=True)
        return [now - before for now, before in pairs][: self._extension.device_count()]

    @property
    def copied(self) -> Counter[tuple[int, int]]:
        """Bytes from one device to another, by their two indices; -1 is the host. Pairs without any are not in it."""
        return self._until().copied - self._start.copied

    def sent(self, device: Device) -> int:
        """Bytes from this device to the other ones, without those to the host."""
        index = self._index(device)
        return sum(count for (origin, target), count in self.copied.items() if origin == index and target != HOST)

    def received(self, device: Device) -> int:
        """Bytes from the other devices to this one, without those from the host."""
        index = self._index(device)
        return sum(count for (origin, target), count in self.copied.items() if target == index and origin != HOST)
