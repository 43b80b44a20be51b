"""What a unit has of the tree whose call uses it, and how far gathers for all slots may run ahead in that tree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from dataparallel.replicas.compiled.gate import gate
from dataparallel.sharded.units.owned import LastCopies
from dataparallel.threads.meetings import Place, Turns, here
from dataparallel.threads.slot_costs import waiting

if TYPE_CHECKING:
    from dataparallel.sharded.units.joint import JointGathers
    from dataparallel.sharded.units.unit import Unit

_MAY_HAVE_ARRIVED = 2**20
"""Bytes of small units that may be on a slot at a time before it has asked for them."""

_PATIENCE = 0.25
"""Seconds."""


class Room:
    """How many parameters may be at slots that have not asked for them. Any thread may use it.

    A few small units may wait there, or one unit of any size. A slot that needs a further unit waits until the others
    have taken theirs. In forward it has no permit meanwhile. What a slot has passed by is dropped: it took a later
    unit, or has ended its forward. Where waiting is in vain the slot pulls by itself: what has arrived for it is needed
    later than the unit that it waits for, because another slot has skipped that unit. A slot that waits may also be
    needed for the others to go on: when it has seen nothing move for `_PATIENCE` seconds, it waits no more in its call.
    Waiting saves launches, and is not needed for correct results.

    Attributes:
        was_taken: by a gather of this call or backward.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0
        self._arrived: list[JointGathers] = []  # in the order in which they were launched
        self._aside: dict[int, Turns] = {}  # slots that wait without a permit
        self._movements = 0
        self._has_given_up = self.was_taken = False

    def renew(self) -> None:
        """A new call or backward begins."""
        self._has_given_up = self.was_taken = False

    def is_large(self, number_of_bytes: int) -> bool:
        """True if a unit of this size waits alone."""
        return number_of_bytes > _MAY_HAVE_ARRIVED

    def take(self, gather: JointGathers, number_of_bytes: int) -> bool:
        """Returns false if there is no room for them."""
        with self._lock:
            if self._used and self._used + number_of_bytes > _MAY_HAVE_ARRIVED:
                return False
            self._used += number_of_bytes
            self._arrived.append(gather)
            self.was_taken = True
            return True

    def give_back(self, gather: JointGathers, number_of_bytes: int) -> None:
        """All slots have taken the parameters, or they are dropped. Slots that wait for room look again."""
        with self._lock:
            self._used -= number_of_bytes
            self._arrived.remove(gather)
            self._movements += 1
        self.look_again()

    def look_again(self) -> None:
        """Lets slots that wait go on."""
        with self._lock:
            aside, self._aside = self._aside, {}
        for turns in {*aside.values()}:
            turns.let_go_on([slot for slot, of in aside.items() if of is turns])

    def launched(self) -> None:
        """A gather has arrived at slots. Those that wait look again: they may have passed its unit by."""
        with self._lock:
            self._movements += 1
        self.look_again()

    def took(self, slot: int, gather: JointGathers) -> None:
        """The slot has passed by what was launched before this."""
        with self._lock:
            passed = self._arrived[: self._arrived.index(gather)] if gather in self._arrived else []
        self._drop(slot, passed)

    def ended(self, slot: int) -> None:
        """The forward of the slot has ended: it takes nothing any more."""
        self._drop(slot, [*self._arrived])

    def _drop(self, slot: int, passed: list[JointGathers]) -> None:
        for gather in passed:
            gather.drop(slot)

    def wait(self, needed: JointGathers, has_come: Callable[[], bool]) -> bool:
        """Waits until ``has_come()``, which looks if there is room. Returns false if the slot waits no more.

        Only the thread of a replica's forward waits: others might be those that have to take what is there.
        """
        place = here()
        if place is None or place.count == 1 or place.meeting.turns is None or place.thread != threading.get_ident():
            return False
        if place.meeting.is_serial:
            return False
        return gate.run_aside(self._wait, place, place.meeting.turns, needed, has_come)

    def _wait(self, place: Place, turns: Turns, needed: JointGathers, has_come: Callable[[], bool]) -> bool:
        while not self._has_given_up:
            before = self._movements
            self._drop(place.index, [gather for gather in [*self._arrived] if gather.number < needed.number])
            if has_come():
                return True
            if any(gather is not needed and gather.waits_for(place.index) for gather in [*self._arrived]):
                return False
            with waiting():
                turn = turns.step_aside(place.index)
                with self._lock:
                    self._aside[place.index] = turns
                    is_late = self._movements != before
                if is_late:
                    self.look_again()
                while not turn.wait(_PATIENCE):
                    if self._movements == before:
                        self._has_given_up = True
                        self.look_again()
                    before = self._movements
        return False


def _no_tree(unit: Unit, slot: int, grads: Sequence[Tensor | None]) -> None:
    raise RuntimeError(f"the unit {unit.name!r} belongs to no tree")


@dataclass
class InTree:
    """What a unit has of the tree whose call uses it. It may be in several trees, one after the other.

    Attributes:
        number: of the unit in the tree: units are collected on distinct slots.
        deliver: takes a slot's gradients.
        settle: waits until no backward uses the unit.
        copies: the last copies of shards that slots have pulled from.
        room: how far joint gathers may run ahead.
    """

    number: int = 0
    deliver: Callable[[Unit, int, Sequence[Tensor | None]], None] = _no_tree
    settle: Callable[[], None] = lambda: None
    copies: LastCopies = field(default_factory=LastCopies)
    room: Room = field(default_factory=Room)
