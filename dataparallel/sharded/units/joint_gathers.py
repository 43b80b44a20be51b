"""Gathers of a unit for all slots at once, launched by the slot that needs the unit first; and how far they run ahead.

Where each slot pulls from each owner, N slots launch N * N copies, which takes longer than the copies of few bytes
themselves. A joint gather takes few launches for each slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.replicas.compiled.gate import gate
from dataparallel.sharded.units.buffers import no_room_for
from dataparallel.sharded.units.shards import OwnedShards, Source, wait_for
from dataparallel.threads.meetings import Place, Scheduler, here
from dataparallel.threads.slot_costs import waiting

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit

_MAY_HAVE_ARRIVED = 2**20
"""Bytes of small units that may be on a slot at a time before it has asked for them."""

_PATIENCE = 0.25
"""Seconds."""

_COLLECTED = 2**22
"""Bytes of a unit's parameters up to which one slot collects them. That takes three times the time for the bytes, and
about half of the launches."""


Attempt: TypeAlias = "Callable[[], Arrived | bool | None]"


class Room:
    """How many parameters may be at slots that have not asked for them. Any thread may use it.

    A few small units may wait there, or one unit of any size. A slot that needs a further unit waits until the others
    have taken theirs. In forward it has no permit meanwhile. What a slot has passed by is dropped: it took a later
    unit, or has ended its forward. Where waiting is in vain the slot pulls by itself: what has arrived for it is needed
    later than the unit that it waits for, because another slot has skipped that unit. A slot that waits may also be
    needed for the others to go on: when it has seen nothing move for `_PATIENCE` seconds, it waits no more in its call.
    Waiting saves launches, and is not needed for correct results.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0
        self._arrived: list[JointGathers] = []  # in the order in which they were launched
        self._aside: dict[int, Scheduler] = {}  # slots that wait without a permit
        self._movements = 0
        self._has_given_up = False  # in this call or backward
        self.was_taken = False  # by a gather of this call or backward

    def renew(self) -> None:
        """A new call or backward begins."""
        self._has_given_up = self.was_taken = False

    def take_room(self, gather: JointGathers, number_of_bytes: int) -> bool:
        """Returns false if there is no room for them."""
        with self._lock:
            if self._used and self._used + number_of_bytes > _MAY_HAVE_ARRIVED:
                return False
            self._used += number_of_bytes
            self._arrived.append(gather)
            self.was_taken = True
            return True

    def give_room_back(self, gather: JointGathers, number_of_bytes: int) -> None:
        """All slots have taken the parameters, or they are dropped. Slots that wait for room look again."""
        with self._lock:
            self._used -= number_of_bytes
            self._arrived.remove(gather)
            self._movements += 1
        self._look_again()

    def note_arrival(self) -> None:
        """A gather has arrived at slots. Those that wait look again: they may have passed its unit by."""
        with self._lock:
            self._movements += 1
        self._look_again()

    def _look_again(self) -> None:
        """Lets slots that wait go on."""
        with self._lock:
            aside, self._aside = self._aside, {}
        for turns in {*aside.values()}:
            turns.unpark([slot for slot, waits_in in aside.items() if waits_in is turns])

    def drop_passed(self, slot: int, taken: JointGathers) -> None:
        """The slot has passed by what was launched before this, which it has taken."""
        with self._lock:
            passed = self._arrived[: self._arrived.index(taken)] if taken in self._arrived else []
        for gather in passed:
            gather.drop_arrived(slot)

    def end_forward(self, slot: int) -> None:
        """The forward of the slot has ended: it takes nothing any more."""
        for gather in [*self._arrived]:
            gather.drop_arrived(slot)

    def wait_for_room(self, needed: JointGathers, attempt: Attempt) -> Arrived | bool | None:
        """Attempts again whenever something moves, until there is a result. Returns none if the slot waits no more.

        Only the thread of a replica's forward waits: others might be those that have to take what is there.
        """
        place = here()
        if place is None or place.count == 1 or place.thread != threading.get_ident():
            return None
        if place.meeting.scheduler is None or place.meeting.is_serial:
            return None
        return gate.run_aside(self._wait, place, place.meeting.scheduler, needed, attempt)

    def _wait(self, place: Place, turns: Scheduler, needed: JointGathers, attempt: Attempt) -> Arrived | bool | None:
        while not self._has_given_up:
            before = self._movements
            for gather in [*self._arrived]:
                if gather.number < needed.number:
                    gather.drop_arrived(place.index)
            if (found := attempt()) is not None:
                return found
            if any(gather is not needed and gather.has_arrived(place.index) for gather in [*self._arrived]):
                return None
            with waiting():
                turn = turns.park(place.index)
                with self._lock:
                    self._aside[place.index] = turns
                    is_late = self._movements != before
                if is_late:
                    self._look_again()
                while not turn.wait(_PATIENCE):
                    if self._movements == before:
                        self._has_given_up = True
                        self._look_again()
                    before = self._movements
        return None


@dataclass
class Arrived:
    """What a slot takes: for each dtype a gathered matrix, complete after the event, with values of these versions."""

    matrices: list[Tensor]
    event: Event
    versions: list[int]


class JointGathers:
    """The joint gathers of one unit. Any thread may use it.

    Of a unit that is not large, one slot collects the pieces of all owners, and passes the matrix on: 2 N launches. The
    slots of a large unit exchange what they have (``comm.all_gather``), so that all links are busy. In backward, where
    there are gradients too, large units are launched by the slot that asks for them last. What arrives belongs to the
    receiving streams of its devices, which are joined by the copies between them.

    Attributes:
        last_pull: after the last reads of shards.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        slots = unit.streams.slots
        # Over machines slots wait for gathers when they need them, so nothing is launched for others.
        self._are_joint = comm.are_apart(slots) and unit.sharded_over[0] == 1 and unit.full_bytes > 0
        self._streams = {device: s for device, s in zip(slots, unit.streams.receiving, strict=True) if s is not None}
        self._lock = threading.Lock()
        self._slots = len(slots)
        self._waiting: dict[int, Arrived] = {}  # of the last gather, for slots that have not taken it
        self._are_together = True
        self._asked: set[int] = set()  # slots that have asked for a large unit in this backward
        self.last_pull: Event | None = None

    @property
    def number(self) -> int:
        """Of the unit in its tree."""
        return self._unit.tree.number

    @property
    def _room(self) -> Room:
        return self._unit.tree.room

    def renew(self, slots: int) -> None:
        """Drops what waits. The next gathers are for the first few slots."""
        with self._lock:
            self._slots, self._are_together, self._asked = slots, True, set()
            self._drop_all()

    def take_arrived(self, slot: int, ready: Mapping[torch.device, Event], ahead: bool) -> Arrived | bool:
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
        found = self._taken(slot, ready, ahead)
        if found is None and ahead:
            return True
        if found is None:
            found = self._room.wait_for_room(self, partial(self._taken, slot, ready, ahead))
        return found or False

    def _taken(self, slot: int, ready: Mapping[torch.device, Event], ahead: bool) -> Arrived | bool | None:
        """`take_arrived`, or ``None`` if there is no room yet."""
        is_new = False
        with self._lock:
            if slot >= self._slots or self._slots < 3 or not self._are_together:
                return False
            if self._waiting and next(iter(self._waiting.values())).versions != self._unit.versions():
                self._drop_all()
            if not self._waiting and self._is_too_early(slot):
                # Who needs it now cannot wait: backward may need this thread.
                self._are_together = ahead
                return None if ahead else False
            if self._waiting:
                # A slot that comes again before others have come at all, as for a module that is used twice, would
                # have one gather launched for each slot.
                self._are_together = slot in self._waiting
            elif self._room.take_room(self, self._unit.full_bytes):
                self._launch_in_room(ready)
                is_new = True
            else:
                return None
            found = self._waiting.pop(slot, False)
            is_last = not self._waiting
        if is_new:
            self._room.note_arrival()
        if is_last:
            self._room.give_room_back(self, self._unit.full_bytes)
        elif found:
            self._room.drop_passed(slot, self)
        return found

    def _is_too_early(self, slot: int) -> bool:
        """True if other slots are not as far in backward as this one, where they have gradients in memory too.

        A slot that asks for a large unit, most often ahead, has freed the one before the unit that it computes. The
        first unit of a backward is needed by all, and there are no gradients yet.
        """
        if self._unit.full_bytes <= _MAY_HAVE_ARRIVED or not _torch.is_in_backward():
            return False
        self._asked.add(slot)
        return len(self._asked) < self._slots and self._room.was_taken

    def drop_arrived(self, slot: int) -> None:
        """What has arrived for the slot is not taken any more. Memory of the receiving streams, which alone use it."""
        with self._lock:
            is_last = self._waiting.pop(slot, None) is not None and not self._waiting
        if is_last:
            self._room.give_room_back(self, self._unit.full_bytes)

    def has_arrived(self, slot: int) -> bool:
        """True if something has arrived for the slot, which has not taken it."""
        return slot in self._waiting

    def _drop_all(self) -> None:
        if self._waiting:
            self._waiting = {}  # memory of the receiving streams, which alone have used it
            self._room.give_room_back(self, self._unit.full_bytes)

    def _launch_in_room(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches a gather. If that fails, its room is free again."""
        versions = self._unit.versions()
        try:
            with torch.no_grad(), streams_set(self._streams):
                arrived = self._launch(ready)
        except BaseException:
            self._room.give_room_back(self, self._unit.full_bytes)
            raise
        events = [Event(self._streams[device]) for device in self._unit.slots[: self._slots]]
        for slot, event in enumerate(events):
            self._waiting[slot] = Arrived([matrices[slot] for matrices in arrived], event, versions)

    def _launch(self, ready: Mapping[torch.device, Event]) -> list[list[Tensor]]:
        """Launches the copies on the receiving streams, and returns for each dtype what arrives at each slot."""
        unit, devices = self._unit, self._unit.slots[: self._slots]
        are_exchanged = self._are_exchanged()
        collector = unit.tree.number % self._slots  # collects the pieces; units use distinct slots
        wait_for({*ready.values()}, self._streams.values())
        arrived: list[list[Tensor]] = []
        for owned in unit.owned:
            source = Source(unit, owned, pulls=1)
            pieces, made = source.pieces(ready)
            try:
                for device, event in made.items():
                    event.make_wait(self._streams[device])
                matrices = self._empty(owned, pieces[0].dtype, devices if are_exchanged else [devices[collector]])
                if are_exchanged:
                    comm.all_gather(matrices, pieces)
                else:
                    comm.copy_each(matrices[0].unbind(), pieces)
            finally:
                self.last_pull = unit.streams.meet("pulls", map(Event, self._streams.values()))
                source.end_pull([] if self.last_pull is None else [self.last_pull])
            if not are_exchanged:
                others = self._empty(owned, matrices[0].dtype, [*devices[:collector], *devices[collector + 1 :]])
                comm.broadcast(matrices[0].view(-1), out=[matrix.view(-1) for matrix in others])
                matrices = [*others[:collector], matrices[0], *others[collector:]]
            arrived.append(matrices)
        return arrived

    def _are_exchanged(self) -> bool:
        """True if slots exchange what they have, as on the route "shards" each device sends a part to all others."""
        is_large = self._unit.full_bytes > _COLLECTED or settings.current().route == "shards"
        return is_large and self._slots == len(self._unit.slots)

    def _empty(self, owned: OwnedShards, dtype: torch.dtype, devices: list[torch.device]) -> list[Tensor]:
        shape = owned.layout.owners, owned.layout.numel
        made: list[Tensor] = []
        try:
            for device in devices:
                made.append(torch.empty(shape, dtype=dtype, device=device))
        except torch.OutOfMemoryError as error:
            unit = self._unit
            raise no_room_for("parameters", unit.name, devices[len(made)], unit.full_bytes, error) from error
        return made
