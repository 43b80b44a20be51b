"""`torch.sim.counted`: launches, and bytes copied between devices, for tests of what a program asks of the devices.

The extension counts all the time, for the whole process, and ``csrc`` decides what a launch is. This file takes the
differences of two readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dataparallel.testing.simulated import extension
from dataparallel.testing.simulated.extension import Device, index_of

__all__ = ["Counts", "counted"]

HOST = -1


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts launches and copied bytes of the whole process, all threads, while inside.

    Blocks may be nested, and several threads may be inside: each block counts everything that happens.

    A launch is an operator that reads or writes elements on a device and does not raise. The number of its tensors does
    not matter: ``cat`` is one launch, and so are the ``torch._foreach_*`` operators for lists on one device, because
    CUDA has fused kernels for them. Lists on several devices are launched one tensor at a time. Where torch itself
    calls several operators, each counts: ``clone`` is a copy, ``ones`` a fill, dropout and recurrent cells are several.

    A copy is one launch, whatever the layouts and dtypes. It counts on the device on whose stream it is launched: the
    source if that is a device, otherwise the target. ``item`` is one launch, and so is a ``resize_`` that moves
    elements to more memory. Allocations, views, operators that only read or change a shape, and operators on tensors
    without elements are no launches.

    The bytes of a copy are those of its target (elements times item size), because torch converts and packs before it
    sends; ``item`` copies one element. Two things do not count: what an operator takes from a CPU tensor by itself
    (numbers, indices), and what torch.distributed moves.

    Yields:
        ``counts.launches``: a list with a number for each device. ``counts.copied``: for each pair ``(from, to)`` of
        devices the bytes that were copied, 0 if there were none; -1 is the host. ``counts.sent(device)`` and
        ``counts.received(device)``: the bytes to and from all other devices, without the host. Inside the block they
        are the counts so far; after it they stay.
    """
    counts = Counts()
    try:
        yield counts
    finally:
        counts._stop()


@dataclass(frozen=True)
class Reading:
    """Everything that has been counted in this process so far."""

    launches: list[int]  # by device, for as many as there can be
    copied: Counter[tuple[int, int]]


def _read() -> Reading:
    launches, copied = extension.C.read_counts()
    return Reading(launches, Counter({(origin, target): bytes_ for origin, target, bytes_ in copied}))


class Counts:
    """What has been counted since `counted` was entered, until its end or, inside the block, until now.

    An operator counts when it is complete on the host. Operators of other threads have counted once these threads are
    known to be done: after a join, or after ``backward()`` has returned.
    """

    def __init__(self) -> None:
        self._start = _read()
        self._end: Reading | None = None

    def _stop(self) -> None:
        self._end = _read()

    def _until(self) -> Reading:
        return _read() if self._end is None else self._end

    @property
    def launches(self) -> list[int]:
        """Launches on each device, by its index."""
        pairs = zip(self._until().launches, self._start.launches, strict=True)
        return [now - before for now, before in pairs][: extension.C.device_count()]

    @property
    def copied(self) -> Counter[tuple[int, int]]:
        """Bytes from one device to another, by their two indices; -1 is the host. Pairs without bytes are left out."""
        return self._until().copied - self._start.copied

    def sent(self, device: Device) -> int:
        """Bytes from this device to all other devices, without the host."""
        index = index_of(device)
        return sum(count for (origin, target), count in self.copied.items() if origin == index and target != HOST)

    def received(self, device: Device) -> int:
        """Bytes from all other devices to this one, without the host."""
        index = index_of(device)
        return sum(count for (origin, target), count in self.copied.items() if target == index and origin != HOST)
