"""`UnitGradients` takes the deliveries of one unit from all slots, and has them summed when every slot has delivered.

It adds in slot order, so the bits are the same in every run. Kernels add gradients where autograd left them
(`unit.PeerTables`). Otherwise a slot packs its gradients into a matrix with a row for each owner, and each owner copies
its rows and adds them. `SumsOfPass` is what the sums of all units share in one pass of backward.

`SumsOverMachines` sums over processes, behind the sums over the slots of each. `make_outputs` makes the nodes whose
backward delivers. `reach_parameters` lets ``backward(inputs=[...])`` reach sharded parameters, which are in no graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.node import Node, run_first
from dataparallel.autograd.pass_of_backward import error_of_failed_pass, running_pass
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, current_streams, streams_joined, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.profiling import stage
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.sharded.order import ordered_in_backward
from dataparallel.sharded.tensor import ShardedTensor, Taker, divided_like, hand_over, is_divided_alike
from dataparallel.sharded.units.gather import SlotUnit
from dataparallel.sharded.units.unit import (
    FormerShardedGrad,
    Gradients,
    Layout,
    PassGradients,
    PeerTables,
    ShardedUnit,
    WaitingSums,
    added_in,
    naming_out_of_memory,
    wait_for,
)

if TYPE_CHECKING:
    from dataparallel.machines.arguments import MachineMesh
    from dataparallel.machines.lanes import End


@dataclass
class Delivery:
    """The gradients that one slot has computed for one unit, and memory for its owner's part of the sum.

    The memory belongs to the slot's computing stream. It is dropped before the slot's next delivery, of any unit, and
    held until the sums that read it are over (`SumsOfPass.release_deliveries`).

    Attributes:
        device: the slot's.
        gradients: for each dtype.
        tables: by which kernels add them; ``None`` if copies do.
        sums: for each dtype memory for the sum of one row, on the slot's device.
        parts: the same in the dtype of the parameters; may share memory with ``sums``. Not used over machines.
        present: positions of the parameters that have a gradient.
        written: an event after the writes to all of these, on the slot's computing stream. ``None`` on the CPU.
    """

    device: torch.device
    gradients: list[Gradients]
    sums: list[Tensor]
    parts: list[Tensor]
    present: set[int]
    written: Event | None
    tables: PeerTables | None = None

    @property
    def matrices(self) -> list[Tensor]:
        """The gradients of a slot that has packed all of them."""
        return [grads for grads in self.gradients if isinstance(grads, Tensor)]

    @property
    def memory(self) -> list[Tensor]:
        """The memory that sums on other streams read and write."""
        found = [*self.sums, *self.parts]
        for grads in self.gradients:
            found += [grads] if isinstance(grads, Tensor) else [grad for grad in grads if grad is not None]
        return found


@dataclass
class SumsOfPass:
    """The state that the sums of all units of a tree share in one pass of backward.

    Attributes:
        computing: the computing stream of each accelerator, as in forward.
        callers: the streams that were current where ``backward()`` was called. They may be others.
        in_flight: for each slot the deliveries whose sums have been launched, each with an event after its last read.
        latest_sum: an event after all sums launched so far, which have read their deliveries by then.
        are_on_host: true if the host adds sums to gradients, once ``latest_sum`` has passed.
        restorers: functions that hold gradients of earlier passes on the slots again, called if the pass fails.
    """

    slots: int
    computing: Mapping[torch.device, torch.Stream]
    summed: PassGradients
    in_flight: dict[int, list[tuple[Delivery, Event | None]]] = field(default_factory=dict)
    latest_sum: Event | None = None
    are_on_host: bool = False
    restorers: list[Callable[[], object]] = field(default_factory=list)
    over_machines: SumsOverMachines | None = None
    callers: set[torch.Stream] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.new = self.summed.begin_pass()

    def note_sums(self, unit: ShardedUnit, by_owner: Sequence[Delivery]) -> None:
        """Notes that sums of these deliveries have been launched on all streams that add.

        Each stream's event comes after the copies to it, which read the deliveries. Threads of several slots may end
        sums at once: their events are recorded one after the other.
        """
        with self._lock:
            self.latest_sum = unit.streams.meet("sums", [Event(stream) for stream in unit.streams.adding.values()])
            for slot, delivery in enumerate(by_owner):
                self.in_flight.setdefault(slot, []).append((delivery, self.latest_sum))

    def add_totals(self, unit: ShardedUnit, totals: Sequence[Sequence[Tensor]], present: Collection[int]) -> None:
        """Takes the gradients of a unit, of which all owners' parts are in ``totals``."""
        for (kept, layout, _), of_owners in zip(unit.groups, totals, strict=True):
            parts = [layout.parts_of(flat, owner) for owner, flat in enumerate(of_owners)]
            for at, i in enumerate(kept):
                if i in present:
                    like, shards = unit.parameters[i], [of_owner[at] for of_owner in parts]
                    gradient = ShardedTensor(shards, like.placement, like.shape, devices=like.devices)
                    self.new.setdefault(like, []).append(gradient)

    def publish(self) -> None:
        """Makes new gradients the parameters' ``.grad``. What the host receives waits for `wait_for_sums`."""
        self.summed.publish({} if self.are_on_host else self.new)

    def release_deliveries(self, slot: int) -> None:
        """Drops the slot's deliveries. Their memory is held until sums that use it are over, or its stream waits."""
        with self._lock:
            deliveries = self.in_flight.pop(slot, [])
        for delivery, after_reads in deliveries:
            if after_reads is not None and not hold(delivery.memory, after_reads):
                after_reads.make_wait(self.computing[delivery.device])

    def _drop_deliveries(self) -> None:
        """Drops all deliveries, once the computing streams wait for the sums that read them."""
        for delivery, after_reads in chain.from_iterable(self.in_flight.values()):
            if after_reads is not None:
                hold(delivery.memory, after_reads)
        self.in_flight.clear()

    def drop_all(self) -> None:
        """Drops everything after a failure. The computing streams, which are current, wait for sums that read it."""
        self._make_computing_wait()
        if self.over_machines is not None:
            self.over_machines.fail(error_of_failed_pass())
        self._drop_deliveries()
        self.new.clear()
        self.summed.fail_pass()
        while self.restorers:
            self.restorers.pop()()

    def _make_computing_wait(self) -> None:
        wait_for([] if self.latest_sum is None else [self.latest_sum], self.computing.values())

    def note_callers(self) -> None:
        """Notes the current streams as callers'. At the end of a task the engine makes the caller's streams current."""
        self.callers.update(current_streams(self.computing).values())

    def make_callers_wait(self) -> None:
        """Makes the callers' streams and the current ones wait for the computing streams.

        On the callers' streams other code uses gradients, and an optimizer writes to the shards that pulls have read.
        """
        self.note_callers()
        for device, computing in self.computing.items():
            others = [stream for stream in self.callers if stream.device == device and stream != computing]
            if others:
                wait_for([Event(computing)], others)

    def wait_for_sums(self) -> None:
        """Makes the computing and callers' streams wait for all sums, adds sums on the host, and runs hooks."""
        self._make_computing_wait()
        self._drop_deliveries()
        if self.over_machines is not None:
            self.over_machines.add_to_gradients(self.add_totals)
        if self.are_on_host and self.latest_sum is not None:
            self.latest_sum.synchronize()
        with streams_set(self.computing):
            self.summed.add(self.new)
        self.restorers.clear()
        self.make_callers_wait()
        self.summed.end_pass()  # uses gradients on the current streams, which wait for the sums now


class UnitGradients:
    """The gradients of one unit. Any thread may use it.

    A pass may reach a unit several times. The first deliveries of all slots are one round, their second deliveries the
    next, and so on. A delivery that a slot has not made by the end of the pass counts as zero. While gradients are not
    synchronised, a slot's deliveries are added on the slot and wait there. So does what the engine brings to parameters
    that a loss uses directly, as their hooks have to see it together with the sums.

    Attributes:
        waiting: these gradients. A pass that synchronises adds them, and drops them when its deliveries are complete.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        # A slot's lock is held while its gradients are packed: on the CPU several threads may deliver for one slot.
        self._packing_locks = [threading.Lock() for _ in unit.slots]
        self.full_bytes = sum(layout.owners * layout.numel * dtype.itemsize for _, layout, dtype in unit.groups)
        self._rounds: list[dict[int, Delivery]] = []  # deliveries by slot that wait for other slots
        self.waiting = WaitingSums(unit.groups, unit.parameters)
        self._new: set[int] = set()  # slots whose waiting gradients are of this pass alone
        self._added: set[int] = set()  # slots whose waiting gradients are in a delivery of this pass
        self._lost: list[FormerShardedGrad] = []  # of parameters whose gradients are incomplete until they are zeroed
        self.receive_direct()

    def receive_direct(self) -> None:
        """Has torch's engine hand over what it brings to parameters directly. ``Module.to_empty`` ends that."""
        for i in self._unit.trainable:
            hand_over(self._unit.parameters[i], weakref.WeakMethod(self._find_taker))

    def _find_taker(self) -> Taker | None:
        return None if self._unit.pass_gradients is None else self._take_direct

    def _take_direct(self, parameter: ShardedTensor, gradient: Tensor) -> None:
        """Takes the gradient of a parameter that a loss uses directly, in the backward of its node."""
        assert self._unit.pass_gradients is not None
        summed = self._unit.pass_gradients()
        if not is_divided_alike(gradient, parameter):
            with torch.no_grad(), ordered_in_backward({shard.device for shard in parameter._shards}):
                gradient = divided_like(gradient, parameter)
        summed.add_direct(parameter, gradient)

    def deliver(self, slot: int, grads: Sequence[Tensor | None], sums: SumsOfPass) -> bool | None:
        """Takes the gradients of one slot, in the order of ``unit.trainable``, and sums if this slot is the last.

        The gradients are ready on the current stream, which is the graph's. The graph may be older than the pass, so
        the pass's computing stream joins it, and owns the delivery. Returns true if the gradients have been summed,
        false if they wait for other slots, and ``None`` if they stay on the slot.
        """
        device = self._unit.slots[slot]
        joined = streams_joined({device: sums.computing[device]} if device in sums.computing else {})
        with stage("reduce_add", slot), self._packing_locks[slot], joined:
            return self._take(slot, grads, sums)

    def _take(self, slot: int, grads: Sequence[Tensor | None], sums: SumsOfPass) -> bool | None:
        sums.release_deliveries(slot)
        with naming_out_of_memory("gradients", self._unit.name, self._unit.slots[slot], self.full_bytes):
            delivery = self._packed(slot, grads)
        with self._lock:
            waiting = self.waiting
            if not self._unit.requires_gradient_sync:
                if delivery.present:
                    if slot not in waiting.matrices:
                        self._new.add(slot)
                    waiting.matrices[slot] = delivery.matrices  # includes the gradients that waited before
                    waiting.present |= delivery.present
                return None
            if slot in waiting.matrices and slot not in self._added:
                self._added.add(slot)
                delivery.present |= waiting.present
            deliveries = next((each for each in self._rounds if slot not in each), None)
            if deliveries is None:
                self._rounds.append(deliveries := {})
            deliveries[slot] = delivery
            if len(deliveries) == sums.slots:
                # The lock is held, so that later rounds of this unit are summed after this one.
                self.add_up(self._rounds.pop(0), sums)
                return True
            return False

    def end_pass(self, sums: SumsOfPass | None) -> None:
        """Sums all deliveries that are left.

        With ``None`` the pass has failed: deliveries that wait for other slots are dropped, and so are gradients that
        this pass alone has left on slots. Gradients of earlier passes wait on, with what has been added to them. They
        belong to the ``.grad`` of before: the user may have zeroed it already, while threads of the failed pass ran on.
        """
        with self._lock:
            waiting, new, added, rounds = self.waiting, self._new, self._added, self._rounds
            self._new, self._added, self._rounds = set(), set(), []
            if sums is None:
                waiting.drop_new(new)
                return
            if self._unit.requires_gradient_sync:
                self.waiting = WaitingSums(self._unit.groups, self._unit.parameters)
                self.waiting.direct = waiting.direct
                sums.restorers.append(partial(setattr, self, "waiting", waiting))
                if rest := waiting.matrices.keys() - added:
                    rounds.append({slot: self._waited(slot, waiting, sums) for slot in sorted(rest)})
            self._hold_or_add_direct(sums)
            for deliveries in rounds:
                self.add_up(deliveries, sums)
            with streams_set(sums.computing):
                self.waiting.note()

    def _waited(self, slot: int, waiting: WaitingSums, sums: SumsOfPass) -> Delivery:
        """Returns the delivery of a slot that brings nothing in this pass, but has waiting gradients."""
        delivery = self._empty_delivery(slot, sums)
        delivery.gradients, delivery.present = [*waiting.matrices[slot]], waiting.present
        delivery.tables = self._unit.tables
        return delivery

    @torch.no_grad()
    def _hold_or_add_direct(self, sums: SumsOfPass) -> None:
        """Holds what the engine has brought to parameters directly if the sums wait, else adds what was held."""
        unit, held, self.waiting.direct = self._unit, self.waiting.direct, {}
        has_replicas = unit.machines is not None and unit.machines.replicate is not None
        if unit.requires_gradient_sync and (unit.requires_all_reduce or not has_replicas):
            for i, gradient in held.items():
                sums.summed.add_direct(unit.parameters[i], gradient)
            return
        held = dict(held)
        for parameter, gradient in sums.summed.take_direct(unit.parameters):
            i = next(i for i in unit.trainable if unit.parameters[i] is parameter)
            held[i] = held[i] + gradient if i in held else gradient.clone()  # other code may hold `gradient`
        self.waiting.direct = held

    def note_lost(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Notes that gradients are incomplete until the user has zeroed them: the gradients of one backward are lost.

        ``computing``: the computing streams. Where there is no ``.grad``, it becomes zeros, which the user may drop.
        """
        with self._lock, streams_set(computing), torch.inference_mode(False), torch.no_grad():
            self._lost = [FormerShardedGrad(self._unit.parameters[i]) for i in self._unit.trainable]

    def refuse_lost(self) -> None:
        """Raises if gradients are incomplete, and the user has not zeroed them."""
        if not self._lost:
            return
        with self._lock:
            self._lost = [former for former in self._lost if not former.is_void()]
            if self._lost:
                raise RuntimeError(
                    f"gradients of the unit {self._unit.name!r} are incomplete since a backward has failed: parts of "
                    "sums are missing. Zero the gradients of the whole model, with model.zero_grad(), and run the "
                    "step again"
                )

    @property
    def are_held(self) -> bool:
        """True if gradients wait on slots for the next sum, or at owners for the next sum over machines."""
        return bool(self.waiting) or self._unit.partial is not None

    def drop_void(self) -> None:
        """Drops waiting gradients of parameters whose ``.grad`` the user has dropped or zeroed since."""
        with self._lock:
            self.waiting.drop_void()
            if (partial_sums := self._unit.partial) is not None:
                partial_sums.drop_void()
                self._unit.partial = partial_sums if partial_sums else None

    def _packed(self, slot: int, grads: Sequence[Tensor | None]) -> Delivery:
        """Returns the slot's delivery, which includes the gradients that wait there, unless a delivery has them."""
        self._refuse_sparse(grads)
        unit, device = self._unit, self._unit.slots[slot]
        waiting = None if slot in self._added else self.waiting.matrices.get(slot)
        of_parameter = dict(zip(unit.trainable, grads, strict=True))
        present = {i for i, grad in of_parameter.items() if grad is not None}
        delivery = Delivery(device, [], [], [], present, None, unit.tables)
        # What waits is added in the dtype of the sums, by all slots if by any.
        is_held = not unit.requires_gradient_sync or bool(self.waiting)
        for at, (kept, layout, dtype) in enumerate(self._unit.groups):
            found = [of_parameter[i] for i in kept]
            summed = None if delivery.tables is None or is_held else delivery.tables.summed[at]
            if summed is not None and _kernels_read(found, layout, summed):
                delivery.gradients.append(found)
                continue
            packed = torch.empty(
                layout.owners, layout.numel, dtype=summed or unit.precision.of_sums(dtype), device=device
            )
            layout.copy_in(found, packed)
            packed = packed.view(len(unit.slots), -1)  # a row for each owner, with its parts on all machines
            if waiting is not None:
                packed.add_(waiting[at])
            delivery.gradients.append(packed)
        if unit.requires_gradient_sync:
            delivery.sums, delivery.parts = self.memory_for_sums(device)
        stream = current_streams([device]).get(device)
        delivery.written = None if stream is None else Event(stream)
        return delivery

    @torch.no_grad()
    def add_up(self, deliveries: Mapping[int, Delivery], sums: SumsOfPass) -> None:
        """Launches the sums of one round: a delivery of each slot, or of some slots at the end of the pass."""
        streams, slots = self._unit.streams, self._unit.slots
        by_owner = [deliveries.get(owner) or self._empty_delivery(owner, sums) for owner in range(len(slots))]
        present = {i for delivery in by_owner for i in delivery.present}
        totals: list[list[Tensor]] = [[] for _ in self._unit.groups]  # for each dtype the parts of all owners
        # These events come after all that the computing streams have done to existing gradients.
        written = streams.meet("deliveries", [each.written for each in by_owner if each.written is not None])
        wait_for([] if written is None else [written], streams.adding.values())
        try:
            self._reduce_scatter(by_owner)
            for owner, own in enumerate(by_owner):
                stream = streams.adding.get(slots[owner])
                with streams_set({} if stream is None else {slots[owner]: stream}):
                    self._end_sum(owner, own, totals, sums)
        except BaseException:
            # Sums that have been launched read the deliveries, which are dropped now.
            wait_for([Event(stream) for stream in streams.adding.values()], sums.computing.values())
            raise
        sums.note_sums(self._unit, by_owner)
        if sums.over_machines is not None:
            sums.over_machines.end_unit(self._unit, present)
            return
        sums.are_on_host |= self._unit.is_offloaded
        sums.add_totals(self._unit, totals, present)

    def _empty_delivery(self, owner: int, sums: SumsOfPass) -> Delivery:
        """Returns a delivery without gradients, for an owner whose slot has no memory for a sum."""
        sums.release_deliveries(owner)  # of earlier units, as the slot has delivered nothing for this
        device = self._unit.slots[owner]
        with streams_set({device: sums.computing[device]} if device in sums.computing else {}):
            memory, parts = self.memory_for_sums(device)
            stream = current_streams([device]).get(device)
        nothing: list[Gradients] = [() for _ in self._unit.groups]
        return Delivery(device, nothing, memory, parts, set(), None if stream is None else Event(stream))

    def _reduce_scatter(self, by_owner: Sequence[Delivery]) -> None:
        """Launches the sums of all dtypes, into the memory that each owner has for them."""
        # Those of a slot that has delivered: another thread's call may have ended their use since.
        tables = next((each.tables for each in by_owner if each.tables is not None), None)
        with streams_set(self._unit.streams.adding), settings.held(self._unit.comm_settings):
            for at in range(len(self._unit.groups)):
                found, totals = [each.gradients[at] for each in by_owner], [each.sums[at] for each in by_owner]
                if tables is not None and tables.summed[at] is not None:
                    tables.reduce_scatter(self._unit.name, at, found, totals)
                else:
                    matrices = [grads for grads in found if isinstance(grads, Tensor)]
                    comm.reduce_scatter(matrices, totals, self._allocate)

    def _allocate(self, like: Tensor, *, device: torch.device) -> Tensor:
        with naming_out_of_memory("summed gradients", self._unit.name, device, like.nbytes):
            return torch.empty_like(like, device=device)

    def _end_sum(self, owner: int, own: Delivery, totals: Sequence[list[Tensor]], sums: SumsOfPass) -> None:
        """Puts the owner's part into ``totals``, or over machines passes it on."""
        unit = self._unit
        factor = unit.gradient_divide_factor * (1 if unit.machines is None else unit.machines.all.size)
        for at, (total, part, parts_of_owners) in enumerate(zip(own.sums, own.parts, totals, strict=True)):
            if factor != 1:
                total.div_(factor)
            if sums.over_machines is not None:
                sums.over_machines.take_part(unit, at, owner, total)
                continue
            if unit.all_reduce_hook is not None:
                unit.all_reduce_hook(total)
            if part is not total:
                part.copy_(total)
            parts_of_owners.append(unit.to_host(part) if unit.is_offloaded else part)

    def memory_for_sums(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Returns memory for an owner's `Delivery.sums` and `Delivery.parts`, of the current stream of its device."""
        unit = self._unit
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for _, layout, dtype in self._unit.groups:
            numel = layout.owners * layout.numel // len(unit.slots)
            with naming_out_of_memory("summed gradients", unit.name, device, self.full_bytes // len(unit.slots)):
                # A hook sees the whole memory, also where no slot has a gradient.
                make = torch.empty if unit.all_reduce_hook is None else torch.zeros
                sums.append(make(numel, dtype=added_in(unit.precision.of_sums(dtype), dtype), device=device))
                is_shared = unit.machines is not None or sums[-1].dtype == dtype
                parts.append(sums[-1] if is_shared else torch.empty(numel, dtype=dtype, device=device))
        return sums, parts

    def _refuse_sparse(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in zip(self._unit.trainable, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                shape = list(self._unit.parameters[i].shape)
                raise TypeError(
                    f"the gradient of a parameter of shape {shape} in {self._unit.name!r} has the layout {grad.layout},"
                    " and sharded parameters get dense gradients: pass sparse=False to the Embedding"
                )


def _kernels_read(grads: Sequence[Tensor | None], layout: Layout, dtype: torch.dtype) -> bool:
    """True if kernels that add ``dtype`` can read these gradients where they lie."""
    return all(
        grad is None or (grad.dtype == dtype and grad.is_contiguous() and not columns.dim and type(grad) is Tensor)
        for grad, columns in zip(grads, layout.columns, strict=True)
    )


_BACKWARD = "backward"


_Add: TypeAlias = Callable[[ShardedUnit, Sequence[Sequence[Tensor]], Collection[int]], None]
"""Takes a unit's totals: for each dtype the parts of all owners, and the positions with gradients."""


@dataclass
class _UnitEntry:
    """One unit in the pass, which may get sums of this machine several times.

    Attributes:
        staged: for each dtype and owner the first sum, ready to be sent.
        rest: for each dtype and owner all later sums, added up.
        present: positions of the parameters that have a gradient on this machine.
        results: for each dtype and owner the launched collective, or the sum itself if no other machine takes part.
    """

    number: int
    unit: ShardedUnit
    staged: list[list[Any]]
    rest: list[list[Tensor]]
    present: set[int] = field(default_factory=set)
    has_come: bool = False  # the first sums of all owners are there
    is_sent: bool = False
    results: list[list[Any]] = field(default_factory=list)

    def sent_dtype(self, at: int) -> torch.dtype:
        return self.unit.precision.of_sums(self.unit.groups[at][2])

    def describe(self) -> str:
        """Returns a text that has to be equal on all machines."""
        groups = enumerate(self.unit.groups)
        sizes = ", ".join(f"{layout.numel} {self.sent_dtype(at)}" for at, (_, layout, _) in groups)
        rest = "" if self.unit.requires_all_reduce else ", no all-reduce"
        return f"{_BACKWARD}\nunit {self.unit.name!r} ({sizes}{rest})"


class SumsOverMachines:
    """The sums of one pass over machines. Any thread may use it.

    Each unit is sent once, when this machine has summed it and all units before it have been sent, in the order in
    which they came on rank 0 in an earlier pass. What has not come by the end is zeros, and a mask says which gradients
    exist. Nothing is added to ``.grad`` before all masks have come.
    ``known_order``: the numbers of the units in rank 0's order; empty until `add_to_gradients` has learned it.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        slots: Sequence[torch.device],
        known_order: list[int],
        machines: MachineMesh,
        computing: Mapping[torch.device, torch.Stream],
    ) -> None:
        self._known_order, self._devices, self._computing = known_order, slots, computing
        self._machines, self._shard, self._replicate = machines, machines.shard, machines.replicate
        self._order = [*known_order] or [*reversed(range(len(units)))]
        self._lock = threading.Lock()
        self._entries = [
            _UnitEntry(i, unit, [[] for _ in unit.groups], [[] for _ in unit.groups])
            for i, unit in ((i, units[i]) for i in self._order)
            if unit.requires_gradient_sync and unit.groups
        ]
        self._entry_of = {entry.unit: entry for entry in self._entries}
        self._arrived: list[int] = []  # numbers of units in the order in which they came
        self._is_ended = not self._entries
        # Without a shard group, sums that wait for an all-reduce are sent to no other machine.
        self._has_others = self._shard is not None or any(entry.unit.requires_all_reduce for entry in self._entries)
        # With NCCL all launches have one order. Slots that share a device share a thread of the engine: it might wait
        # for a gather behind a sum that it has to make itself.
        self._waits_for_end = machines.all.state.has_nccl and len({*slots}) < len(slots)
        self._end: End | None = None  # for each trainable parameter: has a gradient; for each unit: has a rest
        self._mask: list[bool] = []

    # ---- sums of this machine ----------------------------------------------------------------------------------------

    def take_part(self, unit: ShardedUnit, at: int, owner: int, total: Tensor) -> None:
        """Takes the sum of an owner for dtype number ``at``, made on the current streams. `end_unit` follows.

        ``total``: one part for each machine of the shard group. The caller may not use it any more.
        """
        entry = self._entry_of[unit]
        if entry.has_come:
            rest = entry.rest[at]
            if owner < len(rest):
                rest[owner].add_(total)
            else:
                rest.append(total)
            return
        self._add_partial(entry, at, owner, total)
        entry.staged[at].append(self._staged(entry, total.to(entry.sent_dtype(at))))

    def end_unit(self, unit: ShardedUnit, present: Collection[int]) -> None:
        """Sends all units whose turn has come, after all owners have given their sums of ``unit``."""
        entry = self._entry_of[unit]
        entry.present.update(present)
        if entry.has_come:
            return
        entry.has_come = True
        with self._lock:
            self._arrived.append(entry.number)
            for each in () if self._waits_for_end else self._entries:
                if not each.is_sent:
                    if not each.has_come:
                        break
                    self._send(each)

    def _add_partial(self, entry: _UnitEntry, at: int, owner: int, total: Tensor) -> None:
        if (waiting := entry.unit.partial) is not None:
            total.view(self._machines.shard_size, -1)[self._machines.shard_rank].add_(waiting.matrices[owner][at])

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _staged(self, entry: _UnitEntry, total: Tensor) -> Any:
        """Returns the total, staged on the current stream, or as it is if no other machine takes part."""
        from dataparallel.machines import collectives

        if self._shard is not None:
            return collectives.stage(self._shard, total, total.numel() // self._shard.size, self._computing)
        if self._replicate is None or not entry.unit.requires_all_reduce:
            return total
        return collectives.stage(self._replicate, total)

    def _send(self, entry: _UnitEntry) -> None:
        entry.is_sent = True
        entry.results = [self._launch(entry, staged) for staged in entry.staged]

    def _launch(self, entry: _UnitEntry, staged: Sequence[Any]) -> list[Any]:
        """Launches the reduce-scatter over the shard group, and the all-reduce over the replicate group."""
        shard, replicate = self._shard, self._replicate if entry.unit.requires_all_reduce else None
        if shard is None and replicate is None:
            return [*staged]
        calls = [each.sum if shard is None else each.reduce_scatter for each in staged]
        over, then = (replicate, None) if shard is None else (shard, replicate)
        what = [f"the gradients of {entry.unit.name!r}"] * len(calls)
        return [*self._machines.lane.launch(_BACKWARD, what, calls, entry.describe(), over, then)]

    # ---- the end of the pass -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """The slots have delivered everything. Units that have not come take part with zeros."""
        if self._is_ended:
            return
        with self._lock, torch.no_grad(), streams_set(self._computing):
            self._is_ended = True
            for entry in self._entries:
                if not entry.is_sent:
                    if not entry.has_come:
                        self._fill(entry)
                    self._send(entry)
        for entry in self._entries:
            if (waiting := entry.unit.partial) is not None:
                entry.present.update(waiting.present)
        self._mask = [i in each.present for each in self._entries for i in each.unit.trainable]
        self._mask += [bool(each.rest[0]) for each in self._entries]
        if self._has_others:
            order = None if self._known_order else [*dict.fromkeys([*self._arrived, *self._order])]
            others = [] if self._machines.gathers is None else [self._machines.gathers]
            self._end = self._machines.lane.end(_BACKWARD, self._mask, others, order)

    def fail(self, error: BaseException) -> None:
        """Tells the other machines that the pass has failed on this one before its end."""
        if self._end is None and self._has_others:
            self._machines.all.state.fail(error)
        self._is_ended = True

    def _fill(self, entry: _UnitEntry) -> None:
        for at, (_, layout, dtype) in enumerate(entry.unit.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.shard_size * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(entry.sent_dtype(at), dtype), device=device)
                self._add_partial(entry, at, owner, zeros)
                entry.staged[at].append(self._staged(entry, zeros.to(entry.sent_dtype(at))))

    def add_to_gradients(self, add: _Add) -> None:
        """Waits for all sums, and calls ``add`` with them. If a machine is gone or has failed, it never does."""
        if not self._entries:
            return
        mask, order = (self._mask, None) if self._end is None else self._end.wait()
        if order is not None:
            self._known_order[:] = order
        flags = iter(mask)
        with torch.no_grad(), streams_set(self._computing):
            present = [[i for i in each.unit.trainable if next(flags)] for each in self._entries]
            rests = self._sums_of_rests([each for each in self._entries if next(flags)])
            of_entries = [[self._results(each, at, rests) for at in range(len(each.results))] for each in self._entries]
            for entry, totals in zip(self._entries, of_entries, strict=True):
                if (hook := entry.unit.all_reduce_hook) is not None and not self._stays_partial(entry.unit):
                    for of_owners in totals:
                        for total in of_owners:
                            hook(total)
            parts = [self._parts(entry, totals) for entry, totals in zip(self._entries, of_entries, strict=True)]
            if any(entry.unit.is_offloaded for entry in self._entries):
                for stream in self._computing.values():
                    Event(stream).synchronize()
            for entry, of_dtypes, found in zip(self._entries, parts, present, strict=True):
                self._set(entry.unit, of_dtypes, found, add)

    def _sums_of_rests(self, units: Sequence[_UnitEntry]) -> dict[int, list[list[Any]]]:
        """Sums the rests of these units. Returns the results by the units' numbers."""
        found: dict[int, list[list[Any]]] = {}
        for entry in units:
            found[entry.number] = results = []
            for at, (_, layout, _) in enumerate(entry.unit.groups):
                dtype, numel = entry.sent_dtype(at), self._machines.shard_size * layout.numel
                rest = entry.rest[at] or [torch.zeros(numel, dtype=dtype, device=device) for device in self._devices]
                staged = [self._staged(entry, total.to(dtype)) for total in rest]
                results.append(self._launch(entry, staged))
        return found

    def _results(self, entry: _UnitEntry, at: int, rests: Mapping[int, Sequence[Sequence[Any]]]) -> list[Tensor]:
        """Waits for the sums of all owners, and returns them in the dtype in which they are added."""
        dtype = added_in(entry.sent_dtype(at), entry.unit.groups[at][2])
        sums = [_received(result, self._devices[i]).to(dtype) for i, result in enumerate(entry.results[at])]
        for i, result in enumerate(rests[entry.number][at] if entry.number in rests else ()):
            sums[i] = sums[i] + _received(result, self._devices[i])
        return sums

    def _parts(self, entry: _UnitEntry, totals: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Returns the owners' parts for ``.grad``, or sums that stay partial until a pass all-reduces them."""
        if self._stays_partial(entry.unit):
            return [[*of_owners] for of_owners in totals]
        parts = [
            [total.to(dtype) for total in of_owners]
            for of_owners, (_, _, dtype) in zip(totals, entry.unit.groups, strict=True)
        ]
        unit = entry.unit
        return [[*map(unit.to_host, of_owners)] for of_owners in parts] if unit.is_offloaded else parts

    def _set(self, unit: ShardedUnit, parts: Sequence[Sequence[Tensor]], present: Collection[int], add: _Add) -> None:
        unit.partial = None
        if not self._stays_partial(unit):
            add(unit, parts, present)
        elif present:
            unit.partial = WaitingSums(unit.groups, unit.parameters)
            unit.partial.matrices = dict(enumerate(zip(*parts, strict=True)))
            unit.partial.present.update(present)
            unit.partial.note()

    def _stays_partial(self, unit: ShardedUnit) -> bool:
        return self._replicate is not None and not unit.requires_all_reduce


def _received(result: Any, device: torch.device) -> Tensor:
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)


def make_outputs(
    tensors: Sequence[Tensor], device: torch.device, receive: Callable[[Sequence[Tensor | None]], None]
) -> None:
    """Makes ``tensors``, parameters of a unit, outputs of a node whose backward passes their gradients to ``receive``.

    The engine runs the node, in the thread of the slot's device, once it has all gradients of the unit on the slot.
    From then on the parameters are not needed any more. The node lives as long as the parameters. It refers weakly to
    the object of the method ``receive``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        handle = torch.empty(0, device=device, requires_grad=True)
        ToOwners.apply(handle, list(tensors), weakref.WeakMethod(receive))


class ToOwners(Node):
    """The node of `make_outputs`."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, tensors: list[Tensor], receive: weakref.WeakMethod[Any]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.receive = receive
        run_first(ctx)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        """Passes their gradients on."""
        receive = ctx.receive()
        if receive is None:
            raise RuntimeError(
                "the parameters that this graph uses are gone: their module is, or before its next call one of them "
                "was replaced, or its requires_grad or dtype was changed. Call backward() before that, or call the "
                "module again"
            )
        if any(grad is not None for grad in grads):
            receive(grads)
        return None, None, None


CHOSEN = object()
"""The key in a pass's ``contents`` under which are the ids of the parameters that ``backward(inputs=...)`` names."""


class Receiver:
    """Passes gradients from the node of one slot to the tree. ``first``: the full parameters of slot 0."""

    def __init__(self, unit: ShardedUnit, slot_unit: SlotUnit, first: Sequence[Tensor]) -> None:
        self._unit, self._slot_unit, self._first = unit, slot_unit, first

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Called in the node's backward, which may not be recorded."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True reaches sharded parameters: a graph of their gradients would need them full. Take "
                "gradients of inputs only: torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        chosen: Any = running_pass().contents.get(CHOSEN)
        grads = [g if self._takes(i, chosen) else None for i, g in zip(self._unit.trainable, grads, strict=True)]
        assert self._unit.deliver is not None  # a call has made the graph
        self._unit.deliver(self._slot_unit.slot, grads)
        self._slot_unit.note_gradients()

    def takes_any(self, chosen: Collection[int]) -> bool:
        """True if the unit has a parameter that needs a gradient with one of these ids, or slot 0's copy of it."""
        return any(self._takes(i, chosen) for i in self._unit.trainable)

    def _takes(self, i: int, chosen: Collection[int] | None) -> bool:
        parameter = self._unit.parameters[i]
        if not parameter.requires_grad:  # any more
            return False
        return chosen is None or id(parameter) in chosen or id(self._first[i]) in chosen


def reach_parameters() -> None:
    """Wraps the function with which torch starts its engine, once."""
    _torch.wrap_engine(lambda run_engine: partial(_run_engine, run_engine))


@_torch.not_traced
def _run_engine(
    run_engine: Callable[..., Any],
    outputs: Sequence[Any],
    grads: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    chosen = {id(each) for each in inputs if isinstance(each, (ShardedTensor, ReplicaParameter))}
    nodes = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs] if chosen else []
    roots = [node for node in nodes if node is not None]
    leaves = [leaf for receiver, leaf in _receivers_behind(roots) if receiver.takes_any(chosen)]
    if not leaves:
        return run_engine(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
    if not kwargs["accumulate_grad"]:
        raise RuntimeError(
            "torch.autograd.grad cannot return gradients of sharded parameters, which are summed when the backward has "
            "ended: call loss.backward(inputs=[...]) with these parameters, and read their .grad"
        )
    # A backward of another thread through the same units has all gradients.
    handles = [root.register_prehook(lambda _: running_pass().contents.update({CHOSEN: chosen})) for root in roots]
    kept = [each for each in inputs if not isinstance(each, ReplicaParameter)]  # full parameters have no `.grad`
    try:
        return run_engine(outputs, grads, retain_graph, create_graph, (*kept, *leaves), *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _receivers_behind(roots: Sequence[Any]) -> Iterator[tuple[Receiver, Any]]:
    """Finds the nodes of units behind these nodes: yields their receivers, each with the leaf behind its node."""
    seen: set[Any] = set()
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        if getattr(type(node), "_forward_cls", None) is ToOwners and (receive := node.receive()) is not None:
            yield receive.__self__, node.next_functions[0][0].variable
