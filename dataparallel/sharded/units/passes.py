"""One backward through a tree of units: when it begins and ends, what its sums share, and what happens if it fails.

It may be several passes of the engine: those that it starts inside one for reentrant checkpoints, and those of other
threads at the same time. Their gradients are added up together, and it lasts until all of them have ended.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.devices import CPU
from dataparallel.profiling import stage
from dataparallel.sharded.units.shards import wait_for
from dataparallel.sharded.units.sums import Delivery, PassGradients

if TYPE_CHECKING:
    from dataparallel.sharded.units.sums_over_machines import SumsOverMachines
    from dataparallel.sharded.units.tree import Tree
    from dataparallel.sharded.units.unit import Unit

_PATIENCE = 0.25
"""Seconds. A slot moves when the backward of a unit begins there and when its gradients are there."""

_MAY_WAIT_BYTES = 2**20
"""So many bytes of a slot's gradients may wait for another slot before it stops."""


@dataclass
class SumsOfPass:
    """What the sums of all units of a tree share in one pass of backward.

    Attributes:
        slots: how many replicas take part.
        computing: the computing stream of each accelerator: those of the forward.
        callers: the streams that were current where ``backward()`` was called, which may be others.
        in_flight: for each slot the deliveries whose sums have been launched, with an event after they were read.
        added: for each owner an event after its last sum.
        waiting: what is added to gradients on the host when these events have passed.
        summed: the parameters that have got gradients, and their hooks.
        added_to: gradients of earlier passes that the sums are added to: others may drop them meanwhile.
        latest: after all sums, and their reads.
        over_machines: adds up over machines what slots have added up.
        put_back: for a unit and a slot (their ``id`` and number) what leaves gradients of earlier passes on the slot
            again, if the pass fails. They are part of deliveries that have not been added up.
    """

    slots: int
    computing: Mapping[torch.device, torch.Stream]
    in_flight: dict[int, list[tuple[Delivery, Event | None]]] = field(default_factory=dict)
    added: dict[int, Event] = field(default_factory=dict)
    waiting: list[Callable[[], object]] = field(default_factory=list)
    summed: PassGradients = field(default_factory=PassGradients)
    latest: Event | None = None
    added_to: list[Tensor] = field(default_factory=list)
    put_back: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    over_machines: SumsOverMachines | None = None
    callers: set[torch.Stream] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, slot: int, delivery: Delivery, read: Event | None) -> None:
        """Keeps a delivery until `release`, which waits for the event after its reads."""
        with self._lock:
            self.in_flight.setdefault(slot, []).append((delivery, read))

    def release(self, slot: int) -> None:
        """Makes the slot's computing stream wait for the sums that read its deliveries, and drops these."""
        with self._lock:
            deliveries = self.in_flight.pop(slot, [])
        for delivery, read in deliveries:
            if read is not None:
                read.make_wait(self.computing[(delivery.matrices or delivery.sums)[0].device])

    def drop_all(self) -> None:
        """Drops everything, in order with what reads it. The pass has failed."""
        wait_for([] if self.latest is None else [self.latest], self.computing.values())
        if self.over_machines is not None:
            self.over_machines.fail_round(RuntimeError("its backward has failed, with an error that is shown there"))
        self.in_flight.clear()
        self.waiting.clear()
        self.added_to.clear()
        while self.put_back:
            self.put_back.popitem()[1]()

    def note_callers(self) -> None:
        """Called when a task of the engine ends, which has made the streams current where ``backward()`` was called."""
        self.callers.update(current_streams(self.computing).values())

    def make_callers_wait(self) -> None:
        """Orders the callers' streams, and those that are current, after the computing streams.

        Other code uses gradients there, and an optimizer writes to the shards that pulls have read.
        """
        self.note_callers()
        for device, computing in self.computing.items():
            others = [stream for stream in self.callers if stream.device == device and stream != computing]
            if others:
                wait_for([Event(computing)], others)

    def wait_for_sums(self) -> None:
        """Orders all computing streams and callers' after all sums, and finishes gradients on the host."""
        wait_for([] if self.latest is None else [self.latest], self.computing.values())
        self.in_flight.clear()  # the event is behind the sums that read them
        self.added_to.clear()
        if self.over_machines is not None:
            self.over_machines.add_to_gradients(self.summed)
        if self.waiting:
            for event in self.added.values():
                event.synchronize()
            for finish in self.waiting:
                finish()
        self.put_back.clear()
        self.make_callers_wait()
        # Hooks may use the gradients on the current streams, which wait for the sums now.
        self.summed.run_hooks()


class BackwardPass:
    """One backward. If it fails, what waits is dropped and every unit is freed.

    Slots may not run far ahead of each other: gradients of a fast slot would pile up until the slowest has delivered
    its own. A slot stops before its next unit while too many of its gradients wait for another slot, see
    `wait_for_others`. A slot for which all others wait never stops. It may need, though, what the thread of a slot that
    waits is to compute. So a slot that has seen no other move for `_PATIENCE` seconds waits no more until a slot behind
    has delivered something: waiting saves memory and is not needed for correct results.

    Args:
        tree: whose units are reached.
        slots: the devices of the replicas that take part.
        computing: the computing stream of each accelerator.
        over_machines: adds up over machines, if there are several.

    Attributes:
        sums: what the sums of all units share.
        is_recorded: true if a graph of this backward is recorded.
        has_finished: somebody waits for the sums, or the pass has failed.
    """

    def __init__(
        self,
        tree: Tree,
        slots: Sequence[torch.device],
        computing: Mapping[torch.device, torch.Stream],
        over_machines: SumsOverMachines | None = None,
    ) -> None:
        self._tree = tree
        self._has_returned = self.has_finished = False
        self.sums = SumsOfPass(len(slots), computing, over_machines=over_machines)
        self._have_own_threads, self._included = False, 0
        self.include(slots)
        self.is_recorded = False
        self._tasks: set[PassOfBackward] = set()
        self._changed = threading.Condition()
        self._missing: defaultdict[int, set[Unit]] = defaultdict(set)  # units that each slot will deliver
        # For two slots the units of the first whose gradients wait for the second, and their bytes.
        self._waiting: defaultdict[tuple[int, int], dict[Unit, int]] = defaultdict(dict)
        # The orders of the forwards of this pass, by `id`, and from where on each slot has passed the units.
        self._orders: dict[int, tuple[Sequence[Sequence[Unit]], list[int]]] = {}
        self._deliveries: defaultdict[int, int] = defaultdict(int)  # how many of each slot
        self._gave_up_at: dict[int, int] = {}  # what the slot furthest behind had delivered when a slot gave up
        self._movements = 0
        self._is_over = False

    def include(self, slots: Sequence[torch.device]) -> None:
        """These slots take part, which are the first few of the tree."""
        if len(slots) == self._included:
            return
        self._included = len(slots)
        self.sums.slots = max(self.sums.slots, len(slots))
        self._have_own_threads = len({*slots}) == len(slots) and CPU not in slots

    def join(self, only_if_alone: bool = False) -> bool:
        """Called in the backward of a node: the pass lasts until the engine's task that runs now has ended.

        ``only_if_alone``: unless another task has joined. That is for a backward that came to parameters on a way past
        the hooks. Returns false if the pass is over, and takes no more gradients.
        """
        running = running_pass()
        with self._changed:
            if self._is_over:
                return False
            if running in self._tasks or (only_if_alone and self._tasks):
                return True
            self._tasks.add(running)
        running.on_end(partial(self.end_task, running))
        return True

    @property
    def has_tasks(self) -> bool:
        """True if a task of the engine that has joined the pass has not ended."""
        return bool(self._tasks)

    def has_current_task(self) -> bool:
        """True if the engine's task that runs now has joined the pass."""
        return running_pass() in self._tasks

    def note_delivery(self, slot: int, unit: Unit, number_of_bytes: int) -> None:
        """A slot has delivered a unit's gradients, which may wait for those of other slots."""
        with self._changed:
            for other in range(self.sums.slots):
                if other != slot and unit in self._missing[other]:
                    self._waiting[slot, other][unit] = number_of_bytes
            self._deliveries[slot] += 1
            self._stop_waiting_for(slot, unit)
            self._note_movement()

    def note_unit_begun(self, slot: int, position: int, order: Sequence[Sequence[Unit]]) -> None:
        """The backward of a unit begins on a slot.

        ``order``: for each slot the units of a forward, in the order in which they ended. ``position``: of this one.
        Units that ended later and have not begun are not reached: the slot has passed them.
        """
        if not self._have_own_threads:
            return
        with self._changed:
            if id(order) not in self._orders:
                self._orders[id(order)] = order, [*map(len, order)]
                for each, units in enumerate(order):
                    self._missing[each].update(units)
            _, passed = self._orders[id(order)]
            for unit in order[slot][position + 1 : passed[slot]]:
                self._stop_waiting_for(slot, unit)
            passed[slot] = min(position, passed[slot])
            self._note_movement()

    def _stop_waiting_for(self, slot: int, unit: Unit) -> None:
        """Gradients of this unit on other slots do not wait for this slot, or do so no longer."""
        self._missing[slot].discard(unit)
        for other in range(self.sums.slots):
            self._waiting[other, slot].pop(unit, None)

    def wait_for_others(self, slot: int) -> None:
        """Waits while gradients of this slot wait for another, if each slot's backward has a thread of its own."""
        if not self._have_own_threads:
            return
        with self._changed:
            while (behind := self._slots_behind(slot)) and not self._is_over:
                least = min(self._deliveries[other] for other in behind)
                if self._gave_up_at.get(slot) == least:
                    break
                before = self._movements
                self._changed.wait(_PATIENCE)
                if self._movements == before:
                    self._gave_up_at[slot] = least

    def _slots_behind(self, slot: int) -> list[int]:
        """The slots for which many of this slot's gradients wait."""
        others = range(self.sums.slots)
        return [other for other in others if sum(self._waiting[slot, other].values()) > _MAY_WAIT_BYTES]

    def _note_movement(self) -> None:
        self._movements += 1
        self._changed.notify_all()

    def end_task(self, task: PassOfBackward, ok: bool) -> None:
        """Ends the pass if ``task`` is its last one, or if it has failed."""
        has_failed = not ok
        with self._changed:
            self._tasks.discard(task)
            if self._is_over:
                return
            self.sums.note_callers()
            if self._tasks and not has_failed:
                self._has_returned = True
                self._tree.note_backward_returned()
                return
            self._is_over = True
            self._changed.notify_all()
        try:
            if not has_failed:
                with stage("reduce_add"):
                    self._finish()
        except BaseException:
            has_failed = True
            raise
        finally:
            if has_failed:
                with streams_set(self.sums.computing):
                    for unit in self._tree.units:
                        unit.gradients.end_pass(None)
                self.sums.drop_all()
                if self._has_returned:
                    for unit in self._tree.units:
                        unit.gradients.note_lost(self.sums.computing)
                self.has_finished = True
            self._tree.note_pass_end(self, has_failed)

    def _finish(self) -> None:
        for unit in self._tree.units:
            unit.gradients.end_pass(self.sums)
        if self.sums.over_machines is not None:
            self.sums.over_machines.end_round()
        if all(unit.is_last_backward for unit in self._tree.units):
            self._tree.before_last_sums(self.sums.computing)
            self.sums.wait_for_sums()
            self.has_finished = True
