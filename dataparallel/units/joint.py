"""Gathers of a unit for all slots at once: who needs the unit first launches them.

Where each slot pulls from each owner, N slots launch N * N copies, which takes longer than the copies of few bytes
themselves. A joint gather takes few launches for each slot. There are two ways:

- Of a unit that is not large, one slot collects the pieces of all owners, and passes the parameters on: 2 N launches.
- The slots of a large unit exchange what they have (``comm.all_gather``), so that all links are busy at the same time.

So parameters arrive at slots that have not asked for them. ``units.room`` limits how many. Pieces, the matrix and what
arrives belong to the receiving streams of their devices, which are joined by the copies between them. Only
``units.on_slot`` takes from here.
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
from dataparallel.comm import settings
from dataparallel.streams.current import Event, streams_set
from dataparallel.units.lines import Lines, wait_for
from dataparallel.units.no_room import named_if_no_room
from dataparallel.units.owned import LastCopies, OwnedShards, Source
from dataparallel.units.room import Room

__all__ = ["Arrived", "JointGathers", "OfUnit"]

_COLLECTED = 2**22
"""Bytes of a unit's parameters up to which one slot collects them. That takes three times the time for the bytes, and
about half of the launches."""


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


@dataclass
class Arrived:
    """What a slot takes.

    Attributes:
        flats: for each dtype the gathered matrix, or the parameters in the layout of a full buffer.
        are_matrices: which of the two.
        event: after the copies.
        versions: of the values.
    """

    flats: list[Tensor]
    are_matrices: bool
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
        # Over machines slots wait for gathers when they need them, so nothing is launched for others.
        self._are_joint = comm.are_apart(slots) and unit.sharded_over[0] == 1 and unit.full_bytes > 0
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

    def take(self, slot: int, ready: Mapping[torch.device, Event], ahead: bool) -> Arrived | bool:
        """What has arrived for the slot, after a gather that is launched now if there is none and there is room.

        Without room the slot waits, unless it asks ``ahead`` of its need. Returns true if it has to ask again when it
        needs the unit. Returns false if it has to pull by itself: there are few slots, or some share a device, or they
        need the unit in different rounds, or nobody else goes on.

        ``ready``: for each device an event after which shards there may be read.

        Raises:
            torch.OutOfMemoryError: a device has no room; the message names unit and device.
        """
        if not self._are_joint:
            return False
        found = self._take(slot, ready)
        if found is not None or ahead:
            return True if found is None else found
        arrived: list[Arrived | bool | None] = []

        def has_come() -> bool:
            arrived[:] = [self._take(slot, ready)]
            return arrived[0] is not None

        if not self.room.wait(self, has_come):
            return False
        assert arrived[0] is not None
        return arrived[0]

    def _take(self, slot: int, ready: Mapping[torch.device, Event]) -> Arrived | bool | None:
        """`take`, or ``None`` if there is no room."""
        with self._lock:
            if slot >= self._slots or self._slots < 3 or not self._are_together:
                return False
            if self._waiting and next(iter(self._waiting.values())).versions != self._unit.versions():
                self._drop()
            if self._waiting:
                # A slot that comes again before others have come at all, as for a module that is used twice, would
                # have one gather launched for each slot.
                self._are_together = slot in self._waiting
            elif self.room.take(self, self._unit.full_bytes):
                self._launch_in_room(ready)
            else:
                return None
            found = self._waiting.pop(slot, False)
            is_last = not self._waiting
        if is_last:
            self.room.give_back(self, self._unit.full_bytes)
        elif found:
            self.room.took(slot, self)
        return found

    def drop(self, slot: int) -> None:
        """What has arrived for the slot is not taken any more. Memory of the receiving streams, which alone use it."""
        with self._lock:
            is_last = self._waiting.pop(slot, None) is not None and not self._waiting
        if is_last:
            self.room.give_back(self, self._unit.full_bytes)

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
            self.room.give_back(self, self._unit.full_bytes)

    def _launch_in_room(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches a gather. If that fails, its room is free again."""
        versions = self._unit.versions()
        try:
            with torch.no_grad(), streams_set(self._streams):
                are_matrices = self._are_exchanged()
                arrived = self._launch(ready, are_matrices)
        except BaseException:
            self.room.give_back(self, self._unit.full_bytes)
            raise
        events = [Event(self._streams[device]) for device in self._lines.slots[: self._slots]]
        for slot, event in enumerate(events):
            flats = [of_slots[slot] for of_slots in arrived]
            self._waiting[slot] = Arrived(flats, are_matrices, event, versions)

    def _launch(self, ready: Mapping[torch.device, Event], are_matrices: bool) -> list[list[Tensor]]:
        """Launches the copies on the receiving streams, and returns for each dtype what arrives at each slot."""
        unit, devices = self._unit, self._lines.slots[: self._slots]
        wait_for({*ready.values()}, self._streams.values())
        arrived: list[list[Tensor]] = []
        for owned in unit.owned:
            source = Source(owned, unit.dtype_on_slots(owned.dtype), 1, self._lines.casting, unit.copies)
            pieces, made = source.pieces(ready)
            try:
                for device, event in made.items():
                    event.make_wait(self._streams[device])
                layout, at = owned.layout, devices if are_matrices else [devices[self._here]]
                matrices = [m.view(layout.owners, -1) for m in self._empty(owned, pieces[0].dtype, at)]
                if are_matrices:
                    comm.all_gather(matrices, pieces)
                else:
                    comm.copy_each(matrices[0].unbind(), pieces)
            finally:
                self._last_pull = self._lines.meet("pulls", map(Event, self._streams.values()))
                source.done([] if self._last_pull is None else [self._last_pull])
            arrived.append(matrices if are_matrices else self._passed_on(owned, matrices[0], devices))
        return arrived

    def _passed_on(self, owned: OwnedShards, matrix: Tensor, devices: list[torch.device]) -> list[Tensor]:
        """The parameters on all slots, of which one has the matrix."""
        fulls = self._empty(owned, matrix.dtype, devices)
        with self._named(matrix.device):
            owned.layout.copy_out(matrix, fulls[self._here])
        comm.broadcast(fulls[self._here], out=[full for slot, full in enumerate(fulls) if slot != self._here])
        return fulls

    def _are_exchanged(self) -> bool:
        """True if slots exchange what they have, as on the route "shards" each device sends a part to all others."""
        is_large = self._unit.full_bytes > _COLLECTED or settings.current().route == "shards"
        return is_large and self._slots == len(self._lines.slots)

    @property
    def _here(self) -> int:
        """The slot that collects the pieces. Units use distinct ones."""
        return self.number % self._slots

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
