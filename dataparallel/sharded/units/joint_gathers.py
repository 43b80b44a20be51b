"""`JointGathers` gathers a unit for all slots at once; `GatherBudget` limits how far such gathers run ahead.

Where each slot pulls from each owner, N slots launch N * N copies. For small units the launches take longer than the
copies. The slot that needs a unit first launches one joint gather, which takes few launches for each slot.
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
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.replicas.compiled.compile_lock import compile_lock
from dataparallel.sharded.units.buffers import naming_out_of_memory
from dataparallel.sharded.units.shards import OwnedShards, PullSource, wait_for
from dataparallel.threads.meetings import MeetingPlace, Scheduler, here

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit

_MAY_HAVE_ARRIVED = 2**20
"""Bytes of small units that may lie on a slot at a time before the slot has asked for them."""

_PATIENCE = 0.25
"""Seconds for which a slot waits while nothing moves."""

_COLLECTED = 2**22
"""Bytes of a unit's parameters up to which one slot collects the unit and broadcasts it. An exchange between all slots
moves the bytes in a third of the time, with about twice the launches."""


Attempt: TypeAlias = "Callable[[], Arrived | bool | None]"


class GatherBudget:
    """Limits the bytes of units that have arrived at slots before these asked for them. Any thread may use it.

    A few small units may lie there, or one unit of any size. A slot that needs a further unit waits until the others
    have taken theirs; in forward it gives up its permit meanwhile. A unit that a slot has passed by, because it took a
    later one or ended its forward, is dropped for that slot. A slot pulls by itself where it would wait in vain: if a
    unit has arrived that it needs later, another slot has skipped the unit that it waits for. The others may also need
    the waiting slot to go on: when it has seen nothing move for `_PATIENCE` seconds, nobody waits any more in this call
    or backward. Waiting saves launches, and correct results do not need it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0  # bytes
        self._gathers: list[JointGathers] = []  # in the order of their launches
        self._slots_aside: dict[int, Scheduler] = {}  # slots that wait without a permit
        self._movements = 0  # how often a gather has arrived or been taken
        self._has_given_up = False  # in this call or backward
        self.was_taken = False  # by a gather of this call or backward

    def renew(self) -> None:
        """Begins a new call or backward."""
        self._has_given_up = self.was_taken = False

    def reserve(self, gather: JointGathers, number_of_bytes: int) -> bool:
        """Counts the bytes of ``gather``. Returns false if they exceed the budget."""
        with self._lock:
            if self._used and self._used + number_of_bytes > _MAY_HAVE_ARRIVED:
                return False
            self._used += number_of_bytes
            self._gathers.append(gather)
            self.was_taken = True
            return True

    def release(self, gather: JointGathers, number_of_bytes: int) -> None:
        """Frees the bytes of ``gather``: all slots have taken the unit, or it was dropped. Waiting slots try again."""
        with self._lock:
            self._used -= number_of_bytes
            self._gathers.remove(gather)
            self._movements += 1
        self._wake_slots()

    def note_arrival(self) -> None:
        """Has waiting slots try again: a gather has arrived, and they may have passed its unit by."""
        with self._lock:
            self._movements += 1
        self._wake_slots()

    def _wake_slots(self) -> None:
        """Lets waiting slots go on."""
        with self._lock:
            aside, self._slots_aside = self._slots_aside, {}
        for turns in {*aside.values()}:
            turns.unpark([slot for slot, turns_of_slot in aside.items() if turns_of_slot is turns])

    def drop_passed(self, slot: int, taken: JointGathers) -> None:
        """Drops for a slot all gathers that were launched before ``taken``, which the slot has taken."""
        with self._lock:
            passed = self._gathers[: self._gathers.index(taken)] if taken in self._gathers else []
        for gather in passed:
            gather.drop_arrived(slot)

    def end_forward(self, slot: int) -> None:
        """Drops all gathers for a slot whose forward has ended."""
        for gather in [*self._gathers]:
            gather.drop_arrived(slot)

    def wait_for_release(self, needed: JointGathers, attempt: Attempt) -> Arrived | bool | None:
        """Repeats ``attempt`` whenever something moves, until it succeeds. Returns ``None`` if the slot may not wait.

        Only the thread of a replica's forward waits: any other thread might be one that has to take what has arrived.
        """
        place = here()
        if place is None or place.count == 1 or place.thread != threading.get_ident():
            return None
        if place.meeting.scheduler is None or place.meeting.is_serial:
            return None
        return compile_lock.run_aside(self._wait, place, place.meeting.scheduler, needed, attempt)

    def _wait(
        self, place: MeetingPlace, turns: Scheduler, needed: JointGathers, attempt: Attempt
    ) -> Arrived | bool | None:
        while not self._has_given_up:
            before = self._movements
            for gather in [*self._gathers]:
                if gather.number < needed.number:
                    gather.drop_arrived(place.index)
            if (result := attempt()) is not None:
                return result
            if any(gather is not needed and gather.has_arrived(place.index) for gather in [*self._gathers]):
                return None
            turn = turns.park(place.index)
            with self._lock:
                self._slots_aside[place.index] = turns
                is_late = self._movements != before
            if is_late:
                self._wake_slots()
            while not turn.wait(_PATIENCE):
                if self._movements == before:
                    self._has_given_up = True
                    self._wake_slots()
                before = self._movements
            with self._lock:
                is_still_aside = self._slots_aside.pop(place.index, None) is not None
            if is_still_aside:
                return None  # the scheduler has let it go on, because another replica has failed
        return None


@dataclass
class Arrived:
    """A unit that has been gathered for one slot: for each dtype the gathered matrix."""

    matrices: list[Tensor]
    event: Event  # after which the matrices are complete
    versions: list[int]  # of the parameters whose values these are


class JointGathers:
    """The joint gathers of one unit. Any thread may use it.

    For a small unit one slot collects the pieces of all owners and broadcasts the matrix: 2 N launches. For a large
    unit the slots exchange their pieces (``comm.all_gather``), so that all links are busy. In backward, where gradients
    take memory too, the slot that asks last launches the gather of a large unit. The matrices are memory of the
    receiving streams, which the copies between devices order against each other.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        slots = unit.streams.slots
        # Over machines a slot waits for a gather when it needs the unit, so no slot launches for another.
        self._is_possible = comm.are_apart(slots) and unit.sharded_over[0] == 1 and unit.full_bytes > 0
        self._streams = {device: s for device, s in zip(slots, unit.streams.receiving, strict=True) if s is not None}
        self._lock = threading.Lock()
        self._number_of_slots = len(slots)
        self._untaken: dict[int, Arrived] = {}  # of the last gather, for slots that have not taken it
        self._is_one_round = True  # false once a slot has come again before all others have come
        self._asking_slots: set[int] = set()  # slots that have asked for a large unit in this backward
        self.last_pull: Event | None = None

    def take_last_pull(self) -> Event | None:
        """Returns `last_pull` once. A gather that another thread launches just now comes before this or after it."""
        with self._lock:
            event, self.last_pull = self.last_pull, None
            return event

    @property
    def number(self) -> int:
        return self._unit.binding.number

    @property
    def _budget(self) -> GatherBudget:
        return self._unit.binding.gather_budget

    def renew(self, slots: int) -> None:
        """Drops a gather that slots have not taken. The next gathers are for the first ``slots`` slots."""
        with self._lock:
            self._number_of_slots, self._is_one_round, self._asking_slots = slots, True, set()
            self._drop_all()

    def take_arrived(self, slot: int, ready: Mapping[torch.device, Event], ahead: bool) -> Arrived | bool:
        """Takes the unit for a slot, from a gather that is launched now if none has been and the budget allows it.

        Otherwise the slot waits for the budget, or with ``ahead`` gets true: it has to ask again when it needs the
        unit. Returns false if the slot has to pull by itself: there are few slots, or some share a device, or they need
        the unit in different rounds, or no other slot goes on.
        """
        if not self._is_possible:
            return False
        result = self._attempt(slot, ready, ahead)
        if result is None and ahead:
            return True
        if result is None:
            result = self._budget.wait_for_release(self, partial(self._attempt, slot, ready, ahead))
        return result or False

    def _attempt(self, slot: int, ready: Mapping[torch.device, Event], ahead: bool) -> Arrived | bool | None:
        """Tries `take_arrived` once. Returns ``None`` if the slot has to wait."""
        is_new = False
        with self._lock:
            if slot >= self._number_of_slots or self._number_of_slots < 3 or not self._is_one_round:
                return False
            if self._untaken and next(iter(self._untaken.values())).versions != self._unit.versions():
                self._drop_all()
            if not self._untaken and self._is_too_early(slot):
                # A slot that needs the unit now cannot wait: backward may need this thread.
                self._is_one_round = ahead
                return None if ahead else False
            if self._untaken:
                # A module that is used twice comes again before other slots have come at all. From then on slots pull:
                # joint gathers would be launched for each slot anew.
                self._is_one_round = slot in self._untaken
            elif self._budget.reserve(self, self._unit.full_bytes):
                self._launch_reserved(ready)
                is_new = True
            else:
                return None
            arrived = self._untaken.pop(slot, False)
            is_last = not self._untaken
        if is_new:
            self._budget.note_arrival()
        if is_last:
            self._budget.release(self, self._unit.full_bytes)
        elif arrived:
            self._budget.drop_passed(slot, self)
        return arrived

    def _is_too_early(self, slot: int) -> bool:
        """True if the gather would take memory on slots that are not as far in backward and still hold gradients.

        A slot that asks for a large unit, most often ahead, has freed the one before the unit that it computes. The
        first unit of a backward is never too early: all slots need it, and there are no gradients yet.
        """
        if self._unit.full_bytes <= _MAY_HAVE_ARRIVED or not _torch.is_in_backward():
            return False
        self._asking_slots.add(slot)
        return len(self._asking_slots) < self._number_of_slots and self._budget.was_taken

    def drop_arrived(self, slot: int) -> None:
        """Drops the unit for a slot that will not take it. Only the receiving streams, which own it, have used it."""
        with self._lock:
            is_last = self._untaken.pop(slot, None) is not None and not self._untaken
        if is_last:
            self._budget.release(self, self._unit.full_bytes)

    def has_arrived(self, slot: int) -> bool:
        return slot in self._untaken

    def _drop_all(self) -> None:
        if self._untaken:
            self._untaken = {}  # only the receiving streams, which own this memory, have used it
            self._budget.release(self, self._unit.full_bytes)

    def _launch_reserved(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches a gather, for which the budget was reserved. If the launch fails, the budget is released."""
        versions = self._unit.versions()
        try:
            with torch.no_grad(), streams_set(self._streams):
                gathered = self._launch(ready)
        except BaseException:
            self._budget.release(self, self._unit.full_bytes)
            raise
        events = [Event(self._streams[device]) for device in self._unit.slots[: self._number_of_slots]]
        for slot, event in enumerate(events):
            self._untaken[slot] = Arrived([matrices[slot] for matrices in gathered], event, versions)

    def _launch(self, ready: Mapping[torch.device, Event]) -> list[list[Tensor]]:
        """Launches the copies on the receiving streams. Returns for each dtype the matrices of all slots."""
        unit, devices = self._unit, self._unit.slots[: self._number_of_slots]
        # Either the slots exchange their pieces, or one collects them all. Units use distinct collectors.
        is_exchange = unit.full_bytes > _COLLECTED and self._number_of_slots == len(unit.slots)
        collector = unit.binding.number % self._number_of_slots
        wait_for({*ready.values()}, self._streams.values())
        gathered: list[list[Tensor]] = []
        for owned in unit.owned:
            source = PullSource(unit, owned, pulls=1)
            pieces, written = source.pieces(ready)
            try:
                for device, event in written.items():
                    event.make_wait(self._streams[device])
                matrices = self._empty(owned, pieces[0].dtype, devices if is_exchange else [devices[collector]])
                if is_exchange:
                    comm.all_gather(matrices, pieces)
                else:
                    comm.copy_each(matrices[0].unbind(), pieces)
            finally:
                self.last_pull = unit.streams.meet("pulls", map(Event, self._streams.values()))
                source.end_pull([] if self.last_pull is None else [self.last_pull])
            if not is_exchange:
                others = self._empty(owned, matrices[0].dtype, [*devices[:collector], *devices[collector + 1 :]])
                comm.broadcast(matrices[0].view(-1), out=[matrix.view(-1) for matrix in others])
                matrices = [*others[:collector], matrices[0], *others[collector:]]
            gathered.append(matrices)
        return gathered

    def _empty(self, owned: OwnedShards, dtype: torch.dtype, devices: list[torch.device]) -> list[Tensor]:
        unit, matrices = self._unit, []
        for device in devices:
            with naming_out_of_memory("parameters", unit.name, device, unit.full_bytes):
                matrices.append(torch.empty(owned.layout.owners, owned.layout.numel, dtype=dtype, device=device))
        return matrices
