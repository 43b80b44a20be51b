"""Gathers of a unit for all slots at once, launched by the slot that needs the unit first; and how far they run ahead.

Where each slot pulls from each owner, N slots launch N * N copies, which takes longer than the copies of few bytes
themselves. A joint gather takes few launches for each slot. Only ``units.on_slot`` takes from here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.sharded.units.memory import named_if_no_room
from dataparallel.sharded.units.owned import OwnedShards, Source
from dataparallel.sharded.units.streams import TreeStreams, wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.in_tree import Room
    from dataparallel.sharded.units.unit import Unit

_COLLECTED = 2**22
"""Bytes of a unit's parameters up to which one slot collects them. That takes three times the time for the bytes, and
about half of the launches."""


@dataclass
class Arrived:
    """What a slot takes.

    Attributes:
        matrices: for each dtype the gathered matrix.
        event: after the copies.
        versions: of the values.
    """

    matrices: list[Tensor]
    event: Event
    versions: list[int]


class JointGathers:
    """The joint gathers of one unit. Any thread may use it.

    Of a unit that is not large, one slot collects the pieces of all owners, and passes the matrix on: 2 N launches. The
    slots of a large unit exchange what they have (``comm.all_gather``), so that all links are busy. In backward, where
    there are gradients too, large units are launched by the slot that asks for them last. What arrives belongs to the
    receiving streams of its devices, which are joined by the copies between them.

    Args:
        unit: the unit.
        tree_streams: the streams of the tree.
    """

    def __init__(self, unit: Unit, tree_streams: TreeStreams) -> None:
        self._unit, self._tree_streams = unit, tree_streams
        slots = tree_streams.slots
        # Over machines slots wait for gathers when they need them, so nothing is launched for others.
        self._are_joint = comm.are_apart(slots) and unit.sharded_over[0] == 1 and unit.full_bytes > 0
        self._streams = {device: s for device, s in zip(slots, tree_streams.receiving, strict=True) if s is not None}
        self._lock = threading.Lock()
        self._slots = len(slots)
        self._waiting: dict[int, Arrived] = {}  # of the last gather, for slots that have not taken it
        self._are_together = True
        self._asked: set[int] = set()  # slots that have asked for a large unit in this backward
        self._last_pull: Event | None = None

    @property
    def number(self) -> int:
        """Of the unit in its tree."""
        return self._unit.in_tree.number

    @property
    def _room(self) -> Room:
        return self._unit.in_tree.room

    def renew(self, slots: int) -> None:
        """Drops what waits. The next gathers are for the first few slots."""
        with self._lock:
            self._slots, self._are_together, self._asked = slots, True, set()
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
        found = self._take(slot, ready, ahead)
        if found is not None or ahead:
            return True if found is None else found
        arrived: list[Arrived | bool | None] = []

        def has_come() -> bool:
            arrived[:] = [self._take(slot, ready, ahead)]
            return arrived[0] is not None

        if not self._room.wait(self, has_come):
            return False
        assert arrived[0] is not None
        return arrived[0]

    def _take(self, slot: int, ready: Mapping[torch.device, Event], ahead: bool) -> Arrived | bool | None:
        """`take`, or ``None`` if there is no room yet."""
        is_new = False
        with self._lock:
            if slot >= self._slots or self._slots < 3 or not self._are_together:
                return False
            if self._waiting and next(iter(self._waiting.values())).versions != self._unit.versions():
                self._drop()
            if not self._waiting and self._is_too_early(slot):
                # Who needs it now cannot wait: backward may need this thread.
                self._are_together = ahead
                return None if ahead else False
            if self._waiting:
                # A slot that comes again before others have come at all, as for a module that is used twice, would
                # have one gather launched for each slot.
                self._are_together = slot in self._waiting
            elif self._room.take(self, self._unit.full_bytes):
                self._launch_in_room(ready)
                is_new = True
            else:
                return None
            found = self._waiting.pop(slot, False)
            is_last = not self._waiting
        if is_new:
            self._room.launched()
        if is_last:
            self._room.give_back(self, self._unit.full_bytes)
        elif found:
            self._room.took(slot, self)
        return found

    def _is_too_early(self, slot: int) -> bool:
        """True if other slots are not as far in backward as this one, where they have gradients in memory too.

        A slot that asks for a large unit, most often ahead, has freed the one before the unit that it computes. The
        first unit of a backward is needed by all, and there are no gradients yet.
        """
        if not self._room.is_large(self._unit.full_bytes) or not _torch.is_in_backward():
            return False
        self._asked.add(slot)
        return len(self._asked) < self._slots and self._room.was_taken

    def drop(self, slot: int) -> None:
        """What has arrived for the slot is not taken any more. Memory of the receiving streams, which alone use it."""
        with self._lock:
            is_last = self._waiting.pop(slot, None) is not None and not self._waiting
        if is_last:
            self._room.give_back(self, self._unit.full_bytes)

    def waits_for(self, slot: int) -> bool:
        """True if something has arrived for the slot, which has not taken it."""
        return slot in self._waiting

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
            self._room.give_back(self, self._unit.full_bytes)

    def _launch_in_room(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches a gather. If that fails, its room is free again."""
        versions = self._unit.versions()
        try:
            with torch.no_grad(), streams_set(self._streams):
                arrived = self._launch(ready)
        except BaseException:
            self._room.give_back(self, self._unit.full_bytes)
            raise
        events = [Event(self._streams[device]) for device in self._tree_streams.slots[: self._slots]]
        for slot, event in enumerate(events):
            matrices = [of_slots[slot] for of_slots in arrived]
            self._waiting[slot] = Arrived(matrices, event, versions)

    def _launch(self, ready: Mapping[torch.device, Event]) -> list[list[Tensor]]:
        """Launches the copies on the receiving streams, and returns for each dtype what arrives at each slot."""
        unit, devices = self._unit, self._tree_streams.slots[: self._slots]
        are_exchanged = self._are_exchanged()
        wait_for({*ready.values()}, self._streams.values())
        arrived: list[list[Tensor]] = []
        for owned in unit.owned:
            source = Source(owned, unit.dtype_on_slots(owned.dtype), 1, self._tree_streams.casting, unit.in_tree.copies)
            pieces, made = source.pieces(ready)
            try:
                for device, event in made.items():
                    event.make_wait(self._streams[device])
                at = devices if are_exchanged else [devices[self._here]]
                matrices = self._empty(owned, pieces[0].dtype, at)
                if are_exchanged:
                    comm.all_gather(matrices, pieces)
                else:
                    comm.copy_each(matrices[0].unbind(), pieces)
            finally:
                self._last_pull = self._tree_streams.meet("pulls", map(Event, self._streams.values()))
                source.done([] if self._last_pull is None else [self._last_pull])
            if not are_exchanged:
                others = [device for slot, device in enumerate(devices) if slot != self._here]
                received = self._empty(owned, matrices[0].dtype, others)
                comm.broadcast(matrices[0].view(-1), out=[matrix.view(-1) for matrix in received])
                matrices = [*received[: self._here], matrices[0], *received[self._here :]]
            arrived.append(matrices)
        return arrived

    def _are_exchanged(self) -> bool:
        """True if slots exchange what they have, as on the route "shards" each device sends a part to all others."""
        is_large = self._unit.full_bytes > _COLLECTED or settings.current().route == "shards"
        return is_large and self._slots == len(self._tree_streams.slots)

    @property
    def _here(self) -> int:
        """The slot that collects the pieces. Units use distinct ones."""
        return self._unit.in_tree.number % self._slots

    def _empty(self, owned: OwnedShards, dtype: torch.dtype, devices: list[torch.device]) -> list[Tensor]:
        shape = owned.layout.owners, owned.layout.numel
        made: list[Tensor] = []
        try:
            for device in devices:
                made.append(torch.empty(shape, dtype=dtype, device=device))
        except torch.OutOfMemoryError as error:
            with self._named(devices[len(made)]):
                raise error
        return made

    def _named(self, device: torch.device) -> AbstractContextManager[None]:
        return named_if_no_room("parameters", self._unit.name, device, self._unit.full_bytes)
