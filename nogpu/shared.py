"""What simulated devices and the stand-in for CUDA have in common in Python: indices, switches of the clocks, counts.

The compiled part of it is ``csrc/shared``. This file touches no device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

Device: TypeAlias = "torch.device | str | int | None"


def index_among(device: Device, type_: str, about: str, current: Callable[[], int], count: int, has: str) -> int:
    """Returns the index of a device; for ``None`` that of the current device.

    Args:
        device: what was asked for. An index counts among the devices of the type.
        type_: of these devices.
        about: what the caller is about, for the message: "torch.sim is about simulated devices".
        current: returns the index of the current device.
        count: how many devices there are.
        has: what the process does with them, for the message: "simulates".

    Raises:
        ValueError: if this is a device of another type, or if the process does not have it.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != type_:
            raise ValueError(f"{about}; got {device}")
        device = device.index
    index = current() if device is None else device
    if not 0 <= index < count:
        raise ValueError(f"{type_}:{index}: this process {has} {count} devices, {type_}:0 to {type_}:{count - 1}")
    return index


class Switches:
    """Whether the clocks of a process watch, and whether they keep Python stacks.

    Args:
        compiled: returns the compiled module of the devices.
    """

    def __init__(self, compiled: Callable[[], Any]) -> None:
        self._compiled = compiled
        self._lock = threading.Lock()
        self._open_blocks: list[dict[str, bool]] = []  # what each open block sets, in the order of entry

    @contextmanager
    def set(self, enabled: bool, stacks: bool | None) -> Iterator[None]:
        """Sets them while inside, for all threads. If several blocks are open, the one entered last decides."""
        switches = {"clocks": enabled} if stacks is None else {"clocks": enabled, "stacks": stacks}
        with self._lock:
            self._open_blocks.append(switches)
            self._switch()
        try:
            yield
        finally:
            with self._lock:
                # Another block may have set the same.
                self._open_blocks[:] = [block for block in self._open_blocks if block is not switches]
                self._switch()

    def _switch(self) -> None:
        """Applies the switches of the open blocks. The caller holds the lock."""
        now = {"clocks": True, "stacks": False}
        for switches in self._open_blocks:
            now.update(switches)
        self._compiled().enable_clocks(now["clocks"])
        self._compiled().keep_stacks(now["stacks"])


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
