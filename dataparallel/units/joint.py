"""Gathers of small units: one slot collects the pieces of all owners, and passes the parameters on to all slots.

Where each slot pulls from each owner, N slots launch N * N copies, which takes longer than the copies of few bytes
themselves. A joint gather takes 2 N launches. The slot that needs the unit first launches it for all, and the others
take what has arrived for them.

So parameters arrive at slots that have not asked for them. Slots that run one after the other would have all small
units in memory before they use the first. `Room` limits that for a tree. Beyond it slots pull from the owners.

Pieces, the matrix and what arrives belong to the receiving streams of their devices, which are joined by the copies
between them. Only ``units.on_slot`` takes from here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.devices import CPU
from dataparallel.streams.current import Event, streams_set
from dataparallel.units.lines import Lines, wait_for
from dataparallel.units.no_room import named_if_no_room
from dataparallel.units.owned import LastCopies, OwnedShards, Source

__all__ = ["Arrived", "JointGathers", "OfUnit", "Room"]

_GATHERED_JOINTLY = 2**16
"""Bytes of a unit's parameters up to which its gathers are joint."""

_MAY_HAVE_ARRIVED = 2**19
"""Bytes of small units that may be on a slot at a time before it has asked for them."""


class OfUnit(Protocol):
    """What joint gathers have to know of their unit."""

    name: str
    owned: list[OwnedShards]
    copies: LastCopies

    @property
    def full_bytes(self) -> int:
        """The size of the full parameters."""

    @property
    def sharded_over(self) -> tuple[int, int]:
        """Over how many machines, and which of them this is."""

    def dtype_on_slots(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which slots compute."""

    def versions(self) -> list[int]:
        """They grow with every change in place."""


class Room:
    """How many bytes of a tree's units have arrived at slots that have not taken them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0

    def take(self, number_of_bytes: int) -> bool:
        """Returns false if there is no room for them."""
        with self._lock:
            if self._used + number_of_bytes > _MAY_HAVE_ARRIVED:
                return False
            self._used += number_of_bytes
            return True

    def give_back(self, number_of_bytes: int) -> None:
        """They have been taken, or dropped."""
        with self._lock:
            self._used -= number_of_bytes


@dataclass
class Arrived:
    """What a slot takes: for each dtype the parameters in the layout of a full buffer, and an event after the copies.

    They have the values of ``versions``.
    """

    fulls: list[Tensor]
    event: Event
    versions: list[int]


class JointGathers:
    """The joint gathers of one unit. Any thread may use it.

    Args:
        unit: the unit.
        lines: the streams of the tree.

    Attributes:
        room: of the unit's tree, which sets it.
        number: of the unit in its tree, which sets it: units are collected on distinct slots.
    """

    def __init__(self, unit: OfUnit, lines: Lines) -> None:
        self._unit, self._lines = unit, lines
        slots = lines.slots
        are_apart = len({*slots}) == len(slots) and CPU not in slots
        # Over machines slots wait for gathers when they need them, so nothing is launched for others.
        is_here = unit.sharded_over[0] == 1
        self._is_small = are_apart and is_here and 0 < unit.full_bytes <= _GATHERED_JOINTLY
        self._streams = {device: s for device, s in zip(slots, lines.receiving, strict=True) if s is not None}
        self.room, self.number = Room(), 0
        self._lock = threading.Lock()
        self._slots = len(slots)
        self._waiting: dict[int, Arrived] = {}  # of the last gather, for slots that have not taken it
        self._are_together = True
        self._last_pull: Event | None = None

    def renew(self, slots: int) -> None:
        """Drops what waits. The next gathers are for the first few slots."""
        with self._lock:
            self._slots, self._are_together = slots, True
            self._drop()

    def take(self, slot: int, ready: Mapping[torch.device, Event]) -> Arrived | None:
        """What has arrived for the slot, after a gather that is launched now if there is none.

        Returns ``None`` if the slot has to pull by itself: the unit is not small, or there is no room, or slots need
        the unit in different rounds. ``ready``: for each device an event after which shards there may be read.

        Raises:
            torch.OutOfMemoryError: a device has no room; the message names unit and device.
        """
        if not self._is_small:
            return None
        with self._lock:
            if slot >= self._slots or self._slots < 3 or not self._are_together:
                return None
            if self._waiting and next(iter(self._waiting.values())).versions != self._unit.versions():
                self._drop()
            if self._waiting:
                # A slot that comes again before others have come at all, as for a module that is used twice, would
                # have one gather launched for each slot.
                self._are_together = slot in self._waiting
            elif self.room.take(self._unit.full_bytes):
                self._launch_in_room(ready)
            found = self._waiting.pop(slot, None)
            if found is not None and not self._waiting:
                self.room.give_back(self._unit.full_bytes)
            return found

    def last_pull(self) -> Event | None:
        """An event after the last reads of shards."""
        return self._last_pull

    def take_last_pull(self) -> Event | None:
        """The event after the last reads of shards, once."""
        with self._lock:
            found, self._last_pull = self._last_pull, None
            return found

    def _drop(self) -> None:
        if self._waiting:
            self._waiting = {}  # memory of the receiving streams, which alone have used it
            self.room.give_back(self._unit.full_bytes)

    def _launch_in_room(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches a gather. If that fails, its room is free again."""
        versions = self._unit.versions()
        try:
            with torch.no_grad(), streams_set(self._streams):
                arrived = self._launch(ready)
        except BaseException:
            self.room.give_back(self._unit.full_bytes)
            raise
        events = [Event(self._streams[device]) for device in self._lines.slots[: self._slots]]
        for slot, event in enumerate(events):
            self._waiting[slot] = Arrived([of_slots[slot] for of_slots in arrived], event, versions)

    def _launch(self, ready: Mapping[torch.device, Event]) -> list[list[Tensor]]:
        """Launches the copies on the receiving streams, and returns for each dtype what arrives at each slot."""
        unit, devices = self._unit, self._lines.slots[: self._slots]
        here = self.number % len(devices)
        own = self._streams[devices[here]]
        wait_for({*ready.values()}, [own])  # copies to this stream begin after it
        arrived: list[list[Tensor]] = []
        for owned in unit.owned:
            source = Source(owned, unit.dtype_on_slots(owned.dtype), 1, self._lines.casting, unit.copies)
            pieces, made = source.pieces(ready)
            try:
                for device, event in made.items():
                    event.make_wait(self._streams[device])
                fulls = self._empty(owned, pieces[0].dtype, devices)
                with self._named(devices[here]):
                    matrix = pieces[0].new_empty(owned.layout.owners, owned.layout.numel, device=devices[here])
                comm.copy_each(matrix.unbind(), pieces)
            finally:
                self._last_pull = Event(own)
                source.done([self._last_pull])
            with self._named(devices[here]):
                owned.layout.copy_out(matrix, fulls[here])
            comm.broadcast(fulls[here], out=[full for slot, full in enumerate(fulls) if slot != here])
            arrived.append(fulls)
        return arrived

    def _empty(self, owned: OwnedShards, dtype: torch.dtype, devices: list[torch.device]) -> list[Tensor]:
        size = owned.layout.owners * owned.layout.numel
        made: list[Tensor] = []
        try:
            for device in devices:
                made.append(torch.empty(size, dtype=dtype, device=device))
        except torch.OutOfMemoryError as error:
            with self._named(devices[len(made)]):
                raise error
        return made

    def _named(self, device: torch.device) -> AbstractContextManager[None]:
        return named_if_no_room("parameters", self._unit.name, device, self._unit.full_bytes)
