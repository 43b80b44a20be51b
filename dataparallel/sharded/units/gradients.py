"""`UnitGradients` takes the deliveries of one unit from all slots, and has them summed when every slot has delivered.

It adds in slot order, so the bits are the same in every run. Kernels add gradients where autograd left them
(`buffers.PeerTables`). Otherwise a slot packs its gradients into a matrix with a row for each owner, and each owner
copies its rows and adds them. `SumsOfPass` is what the sums of all units share in one pass of backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.autograd.pass_of_backward import error_of_failed_pass
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, current_streams, streams_joined, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.profiling import stage
from dataparallel.sharded import operators
from dataparallel.sharded.tensor import ShardedTensor, Taker, divided_like, hand_over, is_divided_alike
from dataparallel.sharded.units.buffers import Gradients, Layout, PeerTables, added_in, naming_out_of_memory
from dataparallel.sharded.units.sharded_unit import FormerGrad, PassGradients, ShardedUnit
from dataparallel.sharded.units.shards import wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.over_machines import SumsOverMachines


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
        last_sums: for each owner an event after its last sum.
        host_additions: functions that add sums to gradients on the host, once the events in ``last_sums`` have passed.
        latest_sum: an event after all sums launched so far, which have read their deliveries by then.
        restorers: functions that hold gradients of earlier passes on the slots again, called if the pass fails.
    """

    slots: int
    computing: Mapping[torch.device, torch.Stream]
    summed: PassGradients
    in_flight: dict[int, list[tuple[Delivery, Event | None]]] = field(default_factory=dict)
    last_sums: dict[int, Event] = field(default_factory=dict)
    host_additions: list[Callable[[], object]] = field(default_factory=list)
    latest_sum: Event | None = None
    restorers: list[Callable[[], object]] = field(default_factory=list)
    over_machines: SumsOverMachines | None = None
    callers: set[torch.Stream] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.new = self.summed.begin_pass()

    def hold_delivery(self, slot: int, delivery: Delivery, after_reads: Event | None) -> None:
        """Keeps a delivery until `release_deliveries`. ``after_reads``: an event after all reads of it."""
        with self._lock:
            self.in_flight.setdefault(slot, []).append((delivery, after_reads))

    def note_sums(
        self, adding: Mapping[int, torch.Stream], meet: Callable[[Iterable[Event]], Event | None]
    ) -> Event | None:
        """Notes that sums have been launched, for each owner on its stream, and returns an event after all sums so far.

        Threads of several slots may end sums at once: their events are recorded one after the other.
        """
        with self._lock:
            self.last_sums.update({owner: Event(stream) for owner, stream in adding.items()})
            self.latest_sum = meet(self.last_sums.values())
            return self.latest_sum

    def add_totals(self, unit: ShardedUnit, totals: Sequence[Sequence[Tensor]], present: Collection[int]) -> None:
        """Takes the gradients of a unit, of which all owners' parts are in ``totals``."""
        for (kept, layout, _), of_owners in zip(unit.groups, totals, strict=True):
            parts = [layout.parts_of(flat, owner) for owner, flat in enumerate(of_owners)]
            for at, i in enumerate(kept):
                if i in present:
                    like, shards = unit.parameters[i], [of_owner[at] for of_owner in parts]
                    gradient = ShardedTensor(shards, like.placement, like.shape, devices=like.devices)
                    self.summed.add_sum(self.new, like, gradient)

    def release_deliveries(self, slot: int) -> None:
        """Drops the slot's deliveries. Their memory is held until sums that use it are over, or its stream waits."""
        with self._lock:
            deliveries = self.in_flight.pop(slot, [])
        for delivery, after_reads in deliveries:
            if after_reads is not None and not hold(delivery.memory, after_reads):
                after_reads.make_wait(self.computing[delivery.device])

    def _drop_deliveries(self) -> None:
        """Drops all deliveries, once the computing streams wait for the sums that read them."""
        for deliveries in self.in_flight.values():
            for delivery, after_reads in deliveries:
                if after_reads is not None:
                    hold(delivery.memory, after_reads)
        self.in_flight.clear()

    def drop_all(self) -> None:
        """Drops everything after a failure. The computing streams, which are current, wait for sums that read it."""
        self._make_computing_wait()
        if self.over_machines is not None:
            self.over_machines.fail(error_of_failed_pass())
        self._drop_deliveries()
        self.host_additions.clear()
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
        if self.host_additions:
            for event in self.last_sums.values():
                event.synchronize()
            for add in self.host_additions:
                add()
        with streams_set(self.computing):
            self.summed.add(self.new)
        self.restorers.clear()
        self.make_callers_wait()
        self.summed.end_pass()  # uses gradients on the current streams, which wait for the sums now


class UnitGradients:
    """The gradients of one unit. Any thread may use it.

    A pass may reach a unit several times. The first deliveries of all slots are one round, their second deliveries the
    next, and so on. A delivery that a slot has not made by the end of the pass counts as zero. While gradients are not
    synchronised, a slot's deliveries are added on the slot and held there (`_held`). So is what the engine brings to
    parameters that a loss uses directly (`_held_direct`), as their hooks have to see it together with the sums.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        # A slot's lock is held while its gradients are packed: on the CPU several threads may deliver for one slot.
        self._packing_locks = [threading.Lock() for _ in unit.slots]
        self.full_bytes = sum(layout.owners * layout.numel * dtype.itemsize for _, layout, dtype in unit.groups)
        self._rounds: list[dict[int, Delivery]] = []  # deliveries by slot that wait for other slots
        self._held: dict[int, Delivery] = {}
        self._held_direct: dict[int, Tensor] = {}  # by the parameters' positions
        self._newly_holding: set[int] = set()  # slots whose held gradients are of this pass alone
        self._former: dict[int, FormerGrad] = {}  # of the parameters that have held gradients
        self._lost: dict[int, FormerGrad] = {}  # parameters whose gradients are incomplete until they are zeroed
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
            with torch.no_grad(), operators.ordered_in_backward({shard.device for shard in parameter._shards}):
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
        is_new = slot not in self._held or slot in self._newly_holding
        with naming_out_of_memory("gradients", self._unit.name, self._unit.slots[slot], self.full_bytes):
            delivery = self._packed(slot, grads)
        with self._lock:
            if not self._unit.requires_gradient_sync:
                if delivery.present:
                    self._held[slot] = delivery  # includes the gradients that were held before
                    if is_new:
                        self._newly_holding.add(slot)
                return None
            held = self._held.pop(slot, None)
            if held is not None:
                sums.restorers.append(partial(self._put_back, {slot: held}, {}))
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
        """Sums all deliveries that wait.

        With ``None`` the pass has failed: deliveries that wait are dropped, and so are gradients that this pass alone
        has left on slots. Gradients of earlier passes stay held, with what has been added to them; if they were part of
        a delivery that waits, `SumsOfPass.drop_all` puts them back. They belong to the ``.grad`` of before: the user
        may have zeroed it already, while threads of the failed pass ran on.
        """
        with self._lock:
            new, self._newly_holding = self._newly_holding, set()
            rounds, self._rounds = self._rounds, []
            if sums is None:
                for slot in new:
                    self._held.pop(slot, None)
                self._drop({i for held in self._held.values() for i in held.present} - self._former.keys())
                return
            self._hold_or_add_direct(sums)
            held: dict[int, Delivery] = {}
            if self._unit.requires_gradient_sync and self._held:
                held, self._held = self._held, {}
                rounds.append(held)
            former, self._former = self._former, {}
            sums.restorers.append(partial(self._put_back, held, former))
            for deliveries in rounds:
                self.add_up(deliveries, sums)
            with streams_set(sums.computing):
                self._note_held()

    @torch.no_grad()
    def _hold_or_add_direct(self, sums: SumsOfPass) -> None:
        """Holds what the engine has brought to parameters directly if the sums wait, else adds what was held."""
        held, self._held_direct = self._held_direct, {}
        unit = self._unit
        has_replicas = unit.machines is not None and unit.machines.replicate is not None
        if unit.requires_gradient_sync and (unit.requires_all_reduce or not has_replicas):
            if held:
                sums.restorers.append(partial(self._held_direct.update, held))
            for i, gradient in held.items():
                sums.summed.add_direct(unit.parameters[i], gradient)
            return
        for parameter, gradient in sums.summed.take_direct(unit.parameters):
            i = next(i for i in unit.trainable if unit.parameters[i] is parameter)
            held[i] = held[i] + gradient if i in held else gradient.clone()  # other code may hold `gradient`
        self._held_direct = held

    def _put_back(self, held: Mapping[int, Delivery], former: Mapping[int, FormerGrad]) -> None:
        self._held.update(held)
        self._former.update(former)

    def note_lost(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Notes that gradients are incomplete until the user has zeroed them: the gradients of one backward are lost.

        ``computing``: the computing streams. Where there is no ``.grad``, it becomes zeros, which the user may drop.
        """
        with self._lock, streams_set(computing), torch.inference_mode(False), torch.no_grad():
            self._lost.update({i: FormerGrad(self._unit.parameters[i]) for i in self._unit.trainable})

    def refuse_lost(self) -> None:
        """Raises if gradients are incomplete, and the user has not zeroed them."""
        if not self._lost:
            return
        with self._lock:
            self._lost = {i: f for i, f in self._lost.items() if not f.is_void(self._unit.parameters[i])}
            if self._lost:
                raise RuntimeError(
                    f"gradients of the unit {self._unit.name!r} are incomplete since a backward has failed: parts of "
                    "sums are missing. Zero the gradients of the whole model, with model.zero_grad(), and run the "
                    "step again"
                )

    @property
    def are_held(self) -> bool:
        """True if gradients wait on slots for the next sum, or at owners for the next sum over machines."""
        return bool(self._held or self._held_direct) or self._unit.partial is not None

    def drop_void(self) -> None:
        """Drops held gradients of parameters whose ``.grad`` the user has dropped or zeroed since."""
        with self._lock:
            self._drop([i for i, former in self._former.items() if former.is_void(self._unit.parameters[i])])
            if (partial_sums := self._unit.partial) is not None:
                partial_sums.drop_void()
                self._unit.partial = partial_sums if partial_sums.present else None

    def _drop(self, positions: Collection[int]) -> None:
        """Drops what is held for these parameters."""
        for i in positions:
            self._former.pop(i, None)
            self._held_direct.pop(i, None)
            for delivery in self._held.values():
                delivery.present.discard(i)
                for (kept, layout, _), matrix in zip(self._unit.groups, delivery.gradients, strict=True):
                    if i in kept and isinstance(matrix, Tensor):
                        layout.zero_columns(kept.index(i), matrix.view(layout.owners, layout.numel))
        self._held = {slot: held for slot, held in self._held.items() if held.present}

    def _note_held(self) -> None:
        """Notes to which ``.grad`` the held gradients belong. The computing streams are current."""
        for i in sorted({i for held in self._held.values() for i in held.present} | {*self._held_direct}):
            self._former[i] = FormerGrad(self._unit.parameters[i])

    def _packed(self, slot: int, grads: Sequence[Tensor | None]) -> Delivery:
        """Returns the slot's delivery, which includes the gradients that the slot holds."""
        self._refuse_sparse(grads)
        unit, device, held = self._unit, self._unit.slots[slot], self._held.get(slot)
        of_parameter = dict(zip(unit.trainable, grads, strict=True))
        present = {i for i, grad in of_parameter.items() if grad is not None}
        delivery = Delivery(device, [], [], [], present, None, unit.tables)
        # What is held is added in the dtype of the sums, by all slots if by any.
        is_held = not unit.requires_gradient_sync or bool(self._held or self._former)
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
            if held is not None:
                before = held.gradients[at]
                assert isinstance(before, Tensor)
                packed.add_(before)
            delivery.gradients.append(packed)
        if unit.requires_gradient_sync:
            delivery.sums, delivery.parts = self.memory_for_sums(device)
        if held is not None:
            delivery.present |= held.present
        stream = current_streams([device]).get(device)
        delivery.written = None if stream is None else Event(stream)
        return delivery

    def add_up(self, deliveries: Mapping[int, Delivery], sums: SumsOfPass) -> None:
        """Launches the sums of one round: a delivery of each slot, or of some slots at the end of the pass."""
        present = {i for delivery in deliveries.values() for i in delivery.present}
        streams, slots = self._unit.streams, self._unit.slots
        written = [each.written for each in deliveries.values() if each.written is not None]
        all_written = streams.meet("deliveries", written)
        in_flight = [*deliveries.items()]
        of_owners: list[Delivery] = []  # with the memory for each owner's sum
        allocated: list[Event] = []
        totals: list[list[Tensor]] = [[] for _ in self._unit.groups]  # for each dtype the parts of all owners
        with torch.no_grad():
            for owner in range(len(slots)):
                own = deliveries.get(owner)
                if own is None or not own.sums:
                    if own is None:
                        sums.release_deliveries(owner)  # of earlier units, as the slot has delivered nothing for this
                    own = self._empty_delivery(owner, sums)
                    in_flight.append((owner, own))
                    allocated += [] if own.written is None else [own.written]
                of_owners.append(own)
            # These events come after all that the computing streams have done to existing gradients.
            wait_for(allocated if all_written is None else [all_written, *allocated], streams.adding.values())
            try:
                self._reduce_scatter(deliveries, [own.sums for own in of_owners])
                for owner, own in enumerate(of_owners):
                    stream = streams.adding.get(slots[owner])
                    with streams_set({} if stream is None else {slots[owner]: stream}):
                        self._end_sum(owner, own, totals, sums)
            except BaseException:
                # Sums that have been launched read the deliveries, which are dropped now.
                launched = [Event(stream) for stream in streams.adding.values()]
                wait_for(launched, sums.computing.values())
                raise
        # Each of these events comes after the copies to its stream, which read the deliveries.
        adding = {owner: streams.adding[slot] for owner, slot in enumerate(slots) if slot in streams.adding}
        after_reads = sums.note_sums(adding, partial(streams.meet, "sums"))
        for slot, delivery in in_flight:
            sums.hold_delivery(slot, delivery, after_reads)
        if sums.over_machines is not None:
            sums.over_machines.end_unit(self._unit, present)
            return
        if self._unit.is_offloaded:
            sums.host_additions.append(partial(sums.add_totals, self._unit, totals, present))
        else:
            sums.add_totals(self._unit, totals, present)

    def _empty_delivery(self, owner: int, sums: SumsOfPass) -> Delivery:
        """Returns a delivery without gradients, for an owner whose slot has no memory for a sum."""
        device = self._unit.slots[owner]
        with streams_set({device: sums.computing[device]} if device in sums.computing else {}):
            memory, parts = self.memory_for_sums(device)
            stream = current_streams([device]).get(device)
        nothing: list[Gradients] = [() for _ in self._unit.groups]
        return Delivery(device, nothing, memory, parts, set(), None if stream is None else Event(stream))

    def _reduce_scatter(self, deliveries: Mapping[int, Delivery], totals: Sequence[Sequence[Tensor]]) -> None:
        """Launches the sums of all dtypes into ``totals``, for each owner the memory that it has for them."""
        # Those of a slot that has delivered: another thread's call may have ended their use since.
        tables = next((each.tables for each in deliveries.values() if each.tables is not None), None)
        with streams_set(self._unit.streams.adding), settings.held(self._unit.comm_settings):
            for at in range(len(self._unit.groups)):
                if tables is not None and tables.summed[at] is not None:
                    slots = range(len(self._unit.slots))
                    found = [deliveries[slot].gradients[at] if slot in deliveries else () for slot in slots]
                    tables.reduce_scatter(self._unit.name, at, found, [of_owner[at] for of_owner in totals])
                    continue
                found = [deliveries[slot].gradients[at] for slot in sorted(deliveries)]
                matrices = [grads for grads in found if isinstance(grads, Tensor)]
                comm.reduce_scatter(matrices, [of_owner[at] for of_owner in totals], self._allocate)

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
