"""`UnitGradients` takes the deliveries of one unit from all slots, and has them summed when every slot has delivered.

It adds in slot order, so the bits are the same in every run. Kernels add gradients where autograd left them
(`buffers.PeerTables`). Otherwise a slot packs its gradients into a matrix with a row for each owner, and each owner
copies its rows and adds them. `SumsOfPass` is what the sums of all units share in one pass of backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.autograd.pass_of_backward import error_of_failed_pass
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, current_streams, streams_joined, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.profiling import stage
from dataparallel.sharded.order import ordered_in_backward
from dataparallel.sharded.tensor import ShardedTensor, Taker, divided_like, hand_over, is_divided_alike
from dataparallel.sharded.units.buffers import Gradients, Layout, PeerTables, added_in, naming_out_of_memory
from dataparallel.sharded.units.sharded_unit import FormerShardedGrad, PassGradients, ShardedUnit, WaitingSums, wait_for

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
