"""`UnitGradients` takes the deliveries of one unit from all slots, and has them summed when every slot has delivered.

It adds in slot order, so the bits are the same in every run. Kernels add gradients where autograd left them
(`unit.PeerTables`). Otherwise a slot packs its gradients into a matrix with a row for each owner, and each owner copies
its rows and adds them. `BackwardPass` is what the sums of all units share in one backward.

`SumsOverMachines` sums over processes, behind the sums over the slots of each. `make_outputs` makes the nodes whose
backward delivers. `reach_parameters` lets ``backward(inputs=[...])`` reach sharded parameters, which are in no graph.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from dataparallel import _torch, comm
from dataparallel.autograd.node import Node, run_first
from dataparallel.autograd.pass_of_backward import PassOfBackward, error_of_failed_pass, running_pass
from dataparallel.comm import settings
from dataparallel.comm.streams.current import Event, current_streams, memory_of, streams_joined, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.devices import CPU
from dataparallel.gradients.gradient_sums import FormerGrad, hooked
from dataparallel.optimizer_steps import before_steps
from dataparallel.profiling import stage
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.sharded.order import ordered_in_backward
from dataparallel.sharded.tensor import ShardedTensor, Taker, divided_like, hand_over, is_divided_alike
from dataparallel.sharded.units.gather import SlotUnit
from dataparallel.sharded.units.unit import (
    Gradients,
    Layout,
    PeerTables,
    ShardedUnit,
    added_in,
    naming_out_of_memory,
    wait_for,
)

if TYPE_CHECKING:
    from dataparallel.machines.arguments import MachineMesh
    from dataparallel.machines.group import Result


NewGradients: TypeAlias = dict[ShardedTensor, list[Any]]
"""By parameter: sums of one pass that nobody else holds, and that are not in ``.grad`` yet."""


class PassGradients:
    """The gradients of one backward: what units have summed, and what the engine has brought to parameters directly.

    Passes of several trees in one backward share it, because these trees may share units, and hooks run once.

    They go to ``.grad`` when the pass has succeeded, and a pass that fails changes no ``.grad``: its threads may still
    sum when the caller has zeroed all gradients.
    """

    def __init__(self) -> None:
        self._new: list[NewGradients] = []  # of each pass
        self._direct: list[tuple[ShardedTensor, Any]] = []  # parameters, and what the engine has brought
        self._open_passes = 0
        self._has_failed = False

    def begin_pass(self) -> NewGradients:
        """Begins a pass, and returns what it fills. `end_pass` or `fail_pass` follows."""
        self._open_passes += 1
        self._new.append({})
        return self._new[-1]

    def add_direct(self, parameter: ShardedTensor, gradient: Tensor) -> None:
        """Adds a part of a gradient at the end of the backward, when the streams have waited for all sums."""
        self._direct.append((parameter, gradient))

    def take_direct(self, parameters: Collection[ShardedTensor]) -> list[tuple[ShardedTensor, Any]]:
        """Takes back what `add_direct` was given for these parameters."""
        keys = {*map(id, parameters)}
        direct, self._direct = self._direct, [pair for pair in self._direct if id(pair[0]) not in keys]
        return [pair for pair in direct if id(pair[0]) in keys]

    def publish(self, of_pass: NewGradients) -> None:
        """Makes new gradients the parameters' ``.grad`` where there is none, except those that hooks have to see."""
        if self._has_failed:
            raise RuntimeError(
                "this backward has lost gradients: it shares modules with another one, which has failed. Zero the "
                "gradients, and run it again"
            )
        for parameter, gradients in self._unhooked(of_pass):
            if parameter.grad is None:
                parameter.grad = gradients.pop(0)

    @torch.no_grad()
    def add(self, of_pass: NewGradients) -> None:
        """Publishes new gradients, and adds others to ``.grad`` on the current streams, which wait for the sums."""
        self.publish(of_pass)
        while unhooked := self._unhooked(of_pass):
            by_device: defaultdict[torch.device, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
            for parameter, gradients in unhooked:
                assert parameter.grad is not None
                for shard, addition in zip(parameter.grad._shards, gradients.pop(0)._shards, strict=True):
                    shards, additions = by_device[shard.device]
                    shards.append(shard)
                    additions.append(addition)
            for shards, additions in by_device.values():
                _torch.foreach_add_(shards, additions)

    def _unhooked(self, of_pass: NewGradients) -> list[tuple[ShardedTensor, list[Any]]]:
        return [(each, found) for each, found in [*of_pass.items()] if found and not _torch.hooks_of(each)]

    def fail_pass(self) -> None:
        self._open_passes -= 1
        self._has_failed = True

    @torch.no_grad()
    def end_pass(self) -> None:
        """Ends a pass. The last one completes the gradients and runs the parameters' hooks.

        The current streams have waited for the sums.
        """
        self._open_passes -= 1
        if self._open_passes:
            return
        for parameter, direct in self._direct:
            self._new[0].setdefault(parameter, []).append(direct.clone())  # other code may hold `direct`
        self._direct.clear()
        self.add(self._new[0])
        for parameter in dict.fromkeys(chain.from_iterable(self._new)):
            if found := [gradient for of_pass in self._new for gradient in of_pass.pop(parameter, [])]:
                gradient, *others = found
                for other in others:
                    gradient.add_(other)
                changed: Any = hooked(parameter, gradient)
                gradient = changed if is_divided_alike(changed, parameter) else divided_like(changed, gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            for hook in [*(_torch.hooks_after_accumulation_of(parameter) or {}).values()]:
                hook(parameter)


class FormerShardedGrad(FormerGrad):
    """Where there is no ``.grad`` it becomes zeros, made on the current streams, which are the computing ones."""

    def __init__(self, parameter: ShardedTensor) -> None:
        if parameter.grad is None:
            # An operator on sharded tensors would run on other streams in a backward.
            zeros = [torch.zeros_like(shard) for shard in parameter._shards]
            parameter.grad = ShardedTensor(zeros, parameter.placement, parameter.shape, devices=parameter.devices)
        super().__init__(parameter)

    def writes_to(self, grad: ShardedTensor) -> int:
        """Scaling does not count: what is scaled may be the zeros that say that gradients are held."""
        return grad._overwrites

    @torch.no_grad()
    def is_zero(self, grad: ShardedTensor) -> bool:
        with ordered_in_backward({shard.device for shard in grad._shards}):
            return not any(bool(shard.any()) for shard in grad._shards)


class WaitingSums:
    """Gradients of a unit that wait for the next sum: on slots, or at owners for the sums of other machines.

    They are in memory of the computing streams. They are dropped if the user drops or zeroes ``.grad``.

    Attributes:
        matrices: for each slot or owner the gradients of each dtype, in the layouts of ``groups``.
        direct: by position gradients that the engine has brought to parameters directly.
        present: positions of the parameters that have gradients in ``matrices``.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._groups, self._parameters = unit.groups, unit.parameters
        self.matrices: dict[int, Sequence[Tensor]] = {}
        self.direct: dict[int, Tensor] = {}
        self.present: set[int] = set()
        self._former: dict[int, FormerGrad] = {}

    def __bool__(self) -> bool:
        return bool(self.matrices or self.direct)

    def received(self, number: int) -> Sequence[Tensor]:
        """The matrices of a slot or owner, for use on the current stream of its device.

        They may lie in memory of another stream: that of the forward whose gradients wait.
        """
        matrices = self.matrices[number]
        for matrix in matrices:
            if (reader := current_streams([matrix.device]).get(matrix.device)) is not None:
                matrix.record_stream(reader)
        return matrices

    def note(self) -> None:
        """Notes to which ``.grad`` the gradients belong. The computing streams are current."""
        self._former = {i: FormerShardedGrad(self._parameters[i]) for i in sorted(self.present | {*self.direct})}

    def drop_void(self) -> None:
        self._drop([i for i, former in self._former.items() if former.is_void()])

    def drop_new(self, slots: Iterable[int]) -> None:
        """Drops those of ``slots``, and of all parameters that had none when `note` was called last."""
        for slot in slots:
            self.matrices.pop(slot, None)
        self._drop(self.present - self._former.keys())

    def _drop(self, positions: Iterable[int]) -> None:
        for i in positions:
            self._former.pop(i, None)
            self.direct.pop(i, None)
            self.present.discard(i)
            for at, (kept, layout, _) in enumerate(self._groups):
                for matrices in self.matrices.values() if i in kept else ():
                    columns = layout.columns[kept.index(i)]
                    matrices[at].view(-1, layout.numel)[:, columns.start : columns.start + columns.numel].zero_()
        if not self.present:
            self.matrices.clear()


@dataclass
class Delivery:
    """The gradients that one slot has computed for one unit, and memory for its owner's part of the sum.

    The memory belongs to the slot's computing stream. It is dropped before the slot's next delivery, of any unit, and
    held until the sums that read it are over (`BackwardPass.release_deliveries`).

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


_PATIENCE = 0.25
"""Seconds after which a slot stops waiting if no slot has begun the backward of a unit."""

_MAY_WAIT_BYTES = 2**20
"""Bytes of a slot's gradients that may wait for another slot before the slot stops."""


class BackwardPass:
    """One backward of a tree: the tasks of the engine that it includes, and what the sums of all units share.

    It runs while one of its ``tasks`` runs: several, if several threads call backward, and each of them may return
    before the last one. It is over when the last task has ended or one has failed, and takes no more gradients then.
    ``end_task`` is called when a task ends, and ``before_step`` before the optimizer's next step if a ``backward()``
    has returned while another one runs on: see `Tree`.

    No slot may run far ahead of the others, because its gradients would pile up until the slowest slot has delivered
    too (`wait_for_others`).

    Attributes:
        slots: how many take part, the first ones of the tree.
        computing: the computing stream of each accelerator, as in forward.
        latest_sum: an event after all sums launched so far, which have read their deliveries by then.
        are_on_host: true if the host adds sums to gradients, once ``latest_sum`` has passed.
        restorers: functions that hold gradients of earlier passes on the slots again, called if the pass fails.
        reaches_units: true if units take part, not only parameters that a loss uses directly.
        is_recorded: true if a graph of this backward is recorded (``create_graph=True``).
        has_returned: true once a task has ended while others run on.
    """

    def __init__(
        self,
        slots: Sequence[torch.device],
        computing: Mapping[torch.device, torch.Stream],
        summed: PassGradients,
        over_machines: SumsOverMachines | None,
        end_task: Callable[[BackwardPass, PassOfBackward, bool], None],
        before_step: Callable[[Optimizer], bool],
    ) -> None:
        self.computing, self.over_machines = computing, over_machines
        self.summed, self.new = summed, summed.begin_pass()
        self._end_task, self._before_step = end_task, before_step
        self.slots = 0
        self.include(slots)
        self.reaches_units = self.is_recorded = self.has_returned = self._is_over = False
        self.tasks: set[PassOfBackward] = set()
        self._changed = threading.Condition()
        self._to_come: dict[object, list[int]] = {}  # for each slot bytes of gradients that it has still to deliver
        self._gave_up_at: dict[int, int] = {}  # for each slot that gave up: the bytes to come of the slowest slot
        # For each slot the deliveries whose sums have been launched, each with an event after its last read.
        self._in_flight: dict[int, list[tuple[Delivery, Event | None]]] = {}
        self.latest_sum: Event | None = None
        self.are_on_host = False
        self.restorers: list[Callable[[], object]] = []
        # The streams that were current where `backward()` was called. They may be others than the computing ones.
        self._callers: set[torch.Stream] = set()

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def include(self, slots: Sequence[torch.device]) -> None:
        """Has these slots take part, the first ones of the tree."""
        self.slots = max(self.slots, len(slots))
        self._have_own_threads = len({*slots}) == len(slots) and CPU not in slots

    def join(self, only_if_alone: bool = False) -> bool:
        """Makes the pass last until the engine's task that runs now has ended. Called in the backward of a node.

        With ``only_if_alone`` the task joins unless another task has: a backward may reach parameters on a way past the
        hooks. Returns false if the pass is over and takes no more gradients.
        """
        running = running_pass()
        with self._changed:
            if self._is_over:
                return False
            if running in self.tasks or (only_if_alone and self.tasks):
                return True
            self.tasks.add(running)
        running.on_end(partial(self._end_task, self, running))
        return True

    def leave(self, task: PassOfBackward, ok: bool) -> bool:
        """Notes that a task has ended. Returns true, once, if it was the last one or has failed: the pass is over."""
        with self._changed:
            self.tasks.discard(task)
            if self._is_over:
                return False
            self._note_callers()
            if self.tasks and ok:
                self.has_returned = True
                self.publish()
                # The other one may have failed before: torch raises the error while threads still run its nodes. A
                # backward that begins meanwhile takes part in the same pass, and loses gradients when the pass ends.
                before_steps(self._before_step)
                return False
            self._is_over = True
            self._changed.notify_all()
            return True

    def wait_for_others(self, call: object, slot: int, to_come: Sequence[int], left: int) -> None:
        """Waits while too many gradients of this slot wait for another. Does nothing if slots share a thread.

        The backward of a unit of the ``call`` begins. Then the slot has still to deliver ``left`` bytes of gradients,
        and each slot had ``to_come`` at the beginning. The slowest slot never waits. But it may need what the thread of
        a waiting slot has to compute. So a slot that has seen no other move for `_PATIENCE` seconds goes on until the
        slowest one has moved: waiting saves memory, and correct results do not need it.
        """
        if not self._have_own_threads:
            return
        with self._changed:
            of_slots = self._to_come.setdefault(call, [*to_come])
            of_slots[slot] = min(of_slots[slot], left)
            self._changed.notify_all()
            while not self._is_over and max(of_slots) - of_slots[slot] > _MAY_WAIT_BYTES:
                if self._gave_up_at.get(slot) == max(of_slots):
                    break
                if not self._changed.wait(_PATIENCE):
                    self._gave_up_at[slot] = max(of_slots)

    # ---- sums --------------------------------------------------------------------------------------------------------

    def note_sums(self, unit: ShardedUnit, by_owner: Sequence[Delivery]) -> None:
        """Notes that sums of these deliveries have been launched on all streams that add.

        Each stream's event comes after the copies to it, which read the deliveries. Threads of several slots may end
        sums at once: their events are recorded one after the other.
        """
        with self._changed:
            self.latest_sum = unit.streams.meet("sums", [Event(stream) for stream in unit.streams.adding.values()])
            for slot, delivery in enumerate(by_owner):
                self._in_flight.setdefault(slot, []).append((delivery, self.latest_sum))

    def add_totals(self, unit: ShardedUnit, totals: Sequence[Sequence[Tensor]], present: Collection[int]) -> None:
        """Takes the gradients of a unit: for each dtype the parts of all owners, and the positions with gradients."""
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
        with self._changed:
            deliveries = self._in_flight.pop(slot, [])
        for delivery, after_reads in deliveries:
            if after_reads is not None and not hold(delivery.memory, after_reads):
                after_reads.make_wait(self.computing[delivery.device])

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self, units: Sequence[UnitGradients]) -> None:
        """Drops the gradients of a pass that has failed. The computing streams wait for sums that read them."""
        with streams_set(self.computing):
            for gradients in units:
                gradients.end_pass(self, has_failed=True)
            self._make_computing_wait()
            self._drop_deliveries()
            if self.over_machines is not None:
                self.over_machines.fail(error_of_failed_pass())
            self.new.clear()
            self.summed.fail_pass()
            while self.restorers:
                self.restorers.pop()()
        if self.has_returned:
            for gradients in units:
                gradients.note_lost(self.computing)

    def _make_computing_wait(self) -> None:
        wait_for([] if self.latest_sum is None else [self.latest_sum], self.computing.values())

    def _drop_deliveries(self) -> None:
        """Drops all deliveries, once the computing streams wait for the sums that read them."""
        for delivery, after_reads in chain.from_iterable(self._in_flight.values()):
            if after_reads is not None:
                hold(delivery.memory, after_reads)
        self._in_flight.clear()

    def _note_callers(self) -> None:
        """Notes the current streams as callers'. At the end of a task the engine makes the caller's streams current."""
        self._callers.update(current_streams(self.computing).values())

    def make_callers_wait(self) -> None:
        """Makes the callers' streams and the current ones wait for the computing streams.

        On the callers' streams other code uses gradients, and an optimizer writes to the shards that pulls have read.
        """
        self._note_callers()
        for device, computing in self.computing.items():
            others = [stream for stream in self._callers if stream.device == device and stream != computing]
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
        partial: sums of this machine, or of its shard group, that wait for the sums of other machines.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = unit
        self._slot_units: list[SlotUnit] = []
        self._lock = threading.Lock()
        # A slot's lock is held while its gradients are packed: on the CPU several threads may deliver for one slot.
        self._packing_locks = [threading.Lock() for _ in unit.slots]
        self.full_bytes = sum(layout.owners * layout.numel * dtype.itemsize for _, layout, dtype in unit.groups)
        # For each pass the deliveries by slot that wait for other slots. There may be two: a unit that is called alone
        # has a tree of its own.
        self._rounds: dict[BackwardPass, list[dict[int, Delivery]]] = {}
        self.waiting = WaitingSums(unit)
        self.partial: WaitingSums | None = None
        self._new: dict[int, BackwardPass] = {}  # slots whose waiting gradients are of this pass alone
        self._added: dict[int, BackwardPass] = {}  # slots whose waiting gradients are in a delivery of this pass
        self._lost: list[FormerShardedGrad] = []  # of parameters whose gradients are incomplete until they are zeroed
        self.receive_direct()

    def receive_direct(self) -> None:
        """Has torch's engine hand over what it brings to parameters directly. ``Module.to_empty`` ends that."""
        for i in self.unit.trainable:
            hand_over(self.unit.parameters[i], weakref.WeakMethod(self._find_taker))

    def _find_taker(self) -> Taker | None:
        return None if self.unit.join_pass is None else self._take_direct

    def _take_direct(self, parameter: ShardedTensor, gradient: Tensor) -> None:
        """Takes the gradient of a parameter that a loss uses directly, in the backward of its node."""
        assert self.unit.join_pass is not None
        summed = self.unit.join_pass(reaches_units=False).summed
        if not is_divided_alike(gradient, parameter):
            with torch.no_grad(), ordered_in_backward({shard.device for shard in parameter._shards}):
                gradient = divided_like(gradient, parameter)
        summed.add_direct(parameter, gradient)

    def attach(self, slot_unit: SlotUnit) -> None:
        """Makes a slot's parameters outputs of the node that delivers their gradients. Called for each slot in turn."""
        self._slot_units.append(slot_unit)
        if self.unit.trainable:
            trainable = [slot_unit.parameters[i] for i in self.unit.trainable]
            make_outputs(trainable, slot_unit.device, self.receive, slot_unit.slot)

    def receive(self, slot: int, grads: Sequence[Tensor | None]) -> None:
        """Called in the backward of a slot's node, which may not be recorded."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True reaches sharded parameters: a graph of their gradients would need them full. Take "
                "gradients of inputs only: torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        chosen: Any = running_pass().contents.get(CHOSEN)
        grads = [g if self.takes(i, chosen) else None for i, g in zip(self.unit.trainable, grads, strict=True)]
        assert self.unit.join_pass is not None  # a call has made the graph
        self.deliver(slot, grads, self.unit.join_pass(only_if_alone=True))
        self._slot_units[slot].note_gradients()

    def takes(self, i: int, chosen: Collection[int] | None) -> bool:
        """True if parameter ``i`` needs a gradient, and is ``chosen``, by its id or that of slot 0's copy of it."""
        parameter, full = self.unit.parameters[i], self._slot_units[0].parameters[i]
        return parameter.requires_grad and (chosen is None or id(parameter) in chosen or id(full) in chosen)

    def deliver(self, slot: int, grads: Sequence[Tensor | None], running: BackwardPass) -> None:
        """Takes the gradients of one slot, in the order of ``unit.trainable``, and sums if this slot is the last.

        The gradients are ready on the current stream, which is the graph's. The graph may be older than the pass, so
        the pass's computing stream joins it, and owns the delivery.
        """
        device = self.unit.slots[slot]
        computing = running.computing.get(device)
        joined = streams_joined({} if computing is None else {device: computing})
        if computing is not None and computing != current_streams([device])[device]:
            # The engine adds gradients of several uses in memory of the graph's stream.
            for memory in chain.from_iterable(memory_of(grad) for grad in grads if grad is not None):
                memory.record_stream(computing)
        with stage("reduce_add", slot), self._packing_locks[slot], joined:
            running.release_deliveries(slot)
            with naming_out_of_memory("gradients", self.unit.name, device, self.full_bytes):
                delivery = self._packed(slot, grads)
            with self._lock:
                if self.unit.requires_gradient_sync:
                    self._add_to_round(slot, delivery, running)
                elif delivery.present:
                    if slot not in self.waiting.matrices:
                        self._new[slot] = running
                    self.waiting.matrices[slot] = delivery.matrices  # includes the gradients that waited before
                    self.waiting.present |= delivery.present

    def _add_to_round(self, slot: int, delivery: Delivery, running: BackwardPass) -> None:
        """Sums the first round if this was its last delivery. Later rounds are summed later: the lock is held."""
        if slot in self.waiting.matrices and slot not in self._added:
            self._added[slot] = running
            delivery.present |= self.waiting.present
        rounds = self._rounds.setdefault(running, [])
        deliveries = next((each for each in rounds if slot not in each), None)
        if deliveries is None:
            rounds.append(deliveries := {})
        deliveries[slot] = delivery
        if len(deliveries) == running.slots:
            self.add_up(rounds.pop(0), running)

    def end_pass(self, ended: BackwardPass, has_failed: bool = False) -> None:
        """Sums all deliveries that are left.

        If the pass has failed, its deliveries that wait for other slots are dropped, and so are gradients that it alone
        has left on slots. Gradients of earlier passes wait on, with what has been added to them. They belong to the
        ``.grad`` of before: the user may have zeroed it already, while threads of the failed pass ran on.
        """
        with self._lock:
            waiting, added, rounds = self.waiting, {*self._added}, self._rounds.pop(ended, [])
            new = [slot for slot, of in self._new.items() if of is ended]
            self._new = {slot: of for slot, of in self._new.items() if of is not ended}
            self._added = {slot: of for slot, of in self._added.items() if of is not ended}
            if has_failed:
                waiting.drop_new(new)
                return
            if self.unit.requires_gradient_sync:
                self.waiting = WaitingSums(self.unit)
                self.waiting.direct = waiting.direct
                ended.restorers.append(partial(setattr, self, "waiting", waiting))
                if rest := waiting.matrices.keys() - added:
                    rounds.append({slot: self._waited(slot, waiting, ended) for slot in sorted(rest)})
            self._hold_or_add_direct(ended)
            for deliveries in rounds:
                self.add_up(deliveries, ended)
            with streams_set(ended.computing):
                self.waiting.note()

    def _waited(self, slot: int, waiting: WaitingSums, ended: BackwardPass) -> Delivery:
        """Returns the delivery of a slot that brings nothing in this pass, but has waiting gradients."""
        delivery = self._empty_delivery(slot, ended)
        with streams_set(ended.computing):
            delivery.gradients, delivery.present = [*waiting.received(slot)], waiting.present
        delivery.tables = self.unit.tables
        return delivery

    @torch.no_grad()
    def _hold_or_add_direct(self, ended: BackwardPass) -> None:
        """Holds what the engine has brought to parameters directly if the sums wait, else adds what was held."""
        unit, held, self.waiting.direct = self.unit, self.waiting.direct, {}
        has_replicas = unit.machines is not None and unit.machines.replicate is not None
        if unit.requires_gradient_sync and (unit.requires_all_reduce or not has_replicas):
            for i, gradient in held.items():
                ended.summed.add_direct(unit.parameters[i], gradient)
            return
        held = dict(held)
        for parameter, gradient in ended.summed.take_direct(unit.parameters):
            i = next(i for i in unit.trainable if unit.parameters[i] is parameter)
            held[i] = held[i] + gradient if i in held else gradient.clone()  # other code may hold `gradient`
        self.waiting.direct = held

    def note_lost(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Notes that gradients are incomplete until the user has zeroed them: the gradients of one backward are lost.

        ``computing``: the computing streams. Where there is no ``.grad``, it becomes zeros, which the user may drop.
        """
        with self._lock, streams_set(computing), torch.inference_mode(False), torch.no_grad():
            self._lost = [FormerShardedGrad(self.unit.parameters[i]) for i in self.unit.trainable]

    def refuse_lost(self) -> None:
        """Raises if gradients are incomplete, and the user has not zeroed them."""
        if not self._lost:
            return
        with self._lock:
            self._lost = [former for former in self._lost if not former.is_void()]
            if self._lost:
                raise RuntimeError(
                    f"gradients of the unit {self.unit.name!r} are incomplete since a backward has failed: parts of "
                    "sums are missing. Zero the gradients of the whole model, with model.zero_grad(), and run the "
                    "step again"
                )

    @property
    def are_held(self) -> bool:
        """True if gradients wait on slots for the next sum, or at owners for the next sum over machines."""
        return bool(self.waiting) or self.partial is not None

    def drop_void(self) -> None:
        """Drops waiting gradients of parameters whose ``.grad`` the user has dropped or zeroed since."""
        with self._lock:
            self.waiting.drop_void()
            if self.partial is not None:
                self.partial.drop_void()
                self.partial = self.partial or None

    def _packed(self, slot: int, grads: Sequence[Tensor | None]) -> Delivery:
        """Returns the slot's delivery, which includes the gradients that wait there, unless a delivery has them."""
        self._refuse_sparse(grads)
        unit, device = self.unit, self.unit.slots[slot]
        waits = slot in self.waiting.matrices and slot not in self._added
        waiting = self.waiting.received(slot) if waits else None
        of_parameter = dict(zip(unit.trainable, grads, strict=True))
        present = {i for i, grad in of_parameter.items() if grad is not None}
        tables = unit.tables  # read once: another thread's call may end their use
        gradients: list[Gradients] = []
        # What waits is added in the dtype of the sums, by all slots if by any.
        is_held = not unit.requires_gradient_sync or bool(self.waiting)
        for at, (kept, layout, dtype) in enumerate(self.unit.groups):
            found = [of_parameter[i] for i in kept]
            summed = None if tables is None or is_held else tables.summed[at]
            if summed is not None and _kernels_read(found, layout, summed):
                gradients.append(found)
                continue
            packed = torch.empty(
                layout.owners, layout.numel, dtype=summed or unit.precision.of_sums(dtype), device=device
            )
            layout.copy_in(found, packed)
            packed = packed.view(len(unit.slots), -1)  # a row for each owner, with its parts on all machines
            if waiting is not None:
                packed.add_(waiting[at])
            gradients.append(packed)
        return self._delivery(slot, gradients, present, tables, unit.requires_gradient_sync)

    def _delivery(
        self,
        slot: int,
        gradients: list[Gradients],
        present: set[int],
        tables: PeerTables | None = None,
        is_summed: bool = True,
    ) -> Delivery:
        """Returns a delivery, which is there on the current stream, with memory for the sum of the slot's owner."""
        device = self.unit.slots[slot]
        sums, parts = self._memory_for_sums(device) if is_summed else ([], [])
        stream = current_streams([device]).get(device)
        written = None if stream is None else Event(stream)
        return Delivery(device, gradients, sums, parts, present, written, tables)

    @torch.no_grad()
    def add_up(self, deliveries: Mapping[int, Delivery], running: BackwardPass) -> None:
        """Launches the sums of one round: a delivery of each slot, or of some slots at the end of the pass."""
        streams, slots = self.unit.streams, self.unit.slots
        by_owner = [deliveries.get(owner) or self._empty_delivery(owner, running) for owner in range(len(slots))]
        present = {i for delivery in by_owner for i in delivery.present}
        totals: list[list[Tensor]] = [[] for _ in self.unit.groups]  # for each dtype the parts of all owners
        # These events come after all that the computing streams have done to existing gradients.
        written = streams.meet("deliveries", [each.written for each in by_owner if each.written is not None])
        wait_for([] if written is None else [written], streams.adding.values())
        try:
            self._reduce_scatter(by_owner)
            for owner, own in enumerate(by_owner):
                stream = streams.adding.get(slots[owner])
                with streams_set({} if stream is None else {slots[owner]: stream}):
                    self._end_sum(owner, own, totals, running)
        except BaseException:
            # Sums that have been launched read the deliveries, which are dropped now.
            wait_for([Event(stream) for stream in streams.adding.values()], running.computing.values())
            raise
        running.note_sums(self.unit, by_owner)
        if running.over_machines is not None:
            running.over_machines.end_unit(self, present)
            return
        running.are_on_host |= self.unit.is_offloaded
        running.add_totals(self.unit, totals, present)

    def _empty_delivery(self, owner: int, running: BackwardPass) -> Delivery:
        """Returns a delivery without gradients, for an owner whose slot has no memory for a sum."""
        running.release_deliveries(owner)  # of earlier units, as the slot has delivered nothing for this
        device = self.unit.slots[owner]
        with streams_set({device: running.computing[device]} if device in running.computing else {}):
            return self._delivery(owner, [() for _ in self.unit.groups], set())

    def _reduce_scatter(self, by_owner: Sequence[Delivery]) -> None:
        """Launches the sums of all dtypes, into the memory that each owner has for them."""
        # Those of a slot that has delivered: another thread's call may have ended their use since.
        tables = next((each.tables for each in by_owner if each.tables is not None), None)
        with streams_set(self.unit.streams.adding), settings.held(self.unit.comm_settings):
            for at in range(len(self.unit.groups)):
                found, totals = [each.gradients[at] for each in by_owner], [each.sums[at] for each in by_owner]
                if tables is not None and tables.summed[at] is not None:
                    tables.reduce_scatter(self.unit.name, at, found, totals)
                else:
                    matrices = [grads for grads in found if isinstance(grads, Tensor)]
                    comm.reduce_scatter(matrices, totals, self._allocate)

    def _allocate(self, like: Tensor, *, device: torch.device) -> Tensor:
        with naming_out_of_memory("summed gradients", self.unit.name, device, like.nbytes):
            return torch.empty_like(like, device=device)

    def _end_sum(self, owner: int, own: Delivery, totals: Sequence[list[Tensor]], running: BackwardPass) -> None:
        """Puts the owner's part into ``totals``, or over machines passes it on."""
        unit = self.unit
        factor = unit.gradient_divide_factor * (1 if unit.machines is None else unit.machines.all.size)
        for at, (total, part, parts_of_owners) in enumerate(zip(own.sums, own.parts, totals, strict=True)):
            if factor != 1:
                total.div_(factor)
            if running.over_machines is not None:
                running.over_machines.take_part(self, at, owner, total)
                continue
            if unit.all_reduce_hook is not None:
                unit.all_reduce_hook(total)
            if part is not total:
                part.copy_(total)
            parts_of_owners.append(unit.to_host(part) if unit.is_offloaded else part)

    def _memory_for_sums(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Returns memory for an owner's `Delivery.sums` and `Delivery.parts`, of the current stream of its device."""
        unit, sums, parts = self.unit, [], []
        for _, layout, dtype in unit.groups:
            numel = layout.owners * layout.numel // len(unit.slots)
            with naming_out_of_memory("summed gradients", unit.name, device, self.full_bytes // len(unit.slots)):
                # A hook sees the whole memory, also where no slot has a gradient.
                make = torch.empty if unit.all_reduce_hook is None else torch.zeros
                sums.append(make(numel, dtype=added_in(unit.precision.of_sums(dtype), dtype), device=device))
                is_shared = unit.machines is not None or sums[-1].dtype == dtype
                parts.append(sums[-1] if is_shared else torch.empty(numel, dtype=dtype, device=device))
        return sums, parts

    def _refuse_sparse(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in zip(self.unit.trainable, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                shape = list(self.unit.parameters[i].shape)
                raise TypeError(
                    f"the gradient of a parameter of shape {shape} in {self.unit.name!r} has the layout {grad.layout},"
                    " and sharded parameters get dense gradients: pass sparse=False to the Embedding"
                )


def _kernels_read(grads: Sequence[Tensor | None], layout: Layout, dtype: torch.dtype) -> bool:
    """True if kernels that add ``dtype`` can read these gradients where they lie."""
    return all(
        grad is None or (grad.dtype == dtype and grad.is_contiguous() and not columns.dim and type(grad) is Tensor)
        for grad, columns in zip(grads, layout.columns, strict=True)
    )


_BACKWARD = "backward"


@dataclass
class _UnitEntry:
    """One unit in the pass, which may get sums of this machine several times.

    Attributes:
        staged: for each dtype and owner the first sum, ready to be sent.
        rest: for each dtype and owner all later sums, added up; in the end their launched collectives.
        present: positions of the parameters that have a gradient on this machine.
        results: for each dtype and owner the launched collective, or the sum itself if no other machine takes part.
    """

    number: int
    gradients: UnitGradients
    staged: list[list[Any]]
    rest: list[list[Any]]
    present: set[int] = field(default_factory=set)
    has_come: bool = False  # the first sums of all owners are there
    is_sent: bool = False
    results: list[list[Any]] = field(default_factory=list)

    @property
    def unit(self) -> ShardedUnit:
        return self.gradients.unit

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
        units: Sequence[UnitGradients],
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
            _UnitEntry(i, units[i], [[] for _ in units[i].unit.groups], [[] for _ in units[i].unit.groups])
            for i in self._order
            if units[i].unit.requires_gradient_sync and units[i].unit.groups
        ]
        self._entry_of = {entry.gradients: entry for entry in self._entries}
        self._arrived: list[int] = []  # numbers of units in the order in which they came
        self._is_ended = not self._entries
        # Without a shard group, sums that wait for an all-reduce are sent to no other machine.
        self._has_others = self._shard is not None or any(entry.unit.requires_all_reduce for entry in self._entries)
        # With NCCL all launches have one order. Slots that share a device share a thread of the engine: it might wait
        # for a gather behind a sum that it has to make itself.
        self._waits_for_end = machines.all.state.has_nccl and len({*slots}) < len(slots)
        self._end: Result | None = None  # for each trainable parameter: has a gradient; for each unit: has a rest
        self._mask: list[bool] = []

    # ---- sums of this machine ----------------------------------------------------------------------------------------

    def take_part(self, unit: UnitGradients, at: int, owner: int, total: Tensor) -> None:
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
        if (waiting := entry.gradients.partial) is not None:
            total.view(self._machines.shard_size, -1)[self._machines.shard_rank].add_(waiting.received(owner)[at])
        entry.staged[at].append(self._staged(entry, total.to(entry.sent_dtype(at))))

    def end_unit(self, unit: UnitGradients, present: Collection[int]) -> None:
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
            if (waiting := entry.gradients.partial) is not None:
                entry.present.update(waiting.present)
        self._mask = [i in each.present for each in self._entries for i in each.unit.trainable]
        self._mask += [bool(each.rest[0]) for each in self._entries]
        if self._has_others:
            order = None if self._known_order else [*dict.fromkeys([*self._arrived, *self._order])]
            others = [] if self._machines.gathers is None else [self._machines.gathers]
            self._end = self._machines.lane.end(_BACKWARD, self._mask, others, order)

    def fail(self, error: BaseException) -> None:
        """Tells the other machines that the pass has failed on this one. After its end they have used the sums."""
        if self._has_others:
            self._machines.all.state.fail(error)
        self._is_ended = True

    def _fill(self, entry: _UnitEntry) -> None:
        for at, (_, layout, dtype) in enumerate(entry.unit.groups):
            for owner, device in enumerate(self._devices):
                numel = self._machines.shard_size * layout.numel
                zeros = torch.zeros(numel, dtype=added_in(entry.sent_dtype(at), dtype), device=device)
                self.take_part(entry.gradients, at, owner, zeros)

    def add_to_gradients(self, add: Callable[[ShardedUnit, Sequence[Sequence[Tensor]], Collection[int]], None]) -> None:
        """Waits for all sums, and calls ``add`` with them. If a machine is gone or has failed, it never does."""
        if not self._entries:
            return
        mask, order = (self._mask, None) if self._end is None else self._end.wait()
        if order is not None:
            self._known_order[:] = order
        flags = iter(mask)
        with torch.no_grad(), streams_set(self._computing):
            present = [[i for i in each.unit.trainable if next(flags)] for each in self._entries]
            for entry in self._entries:
                if next(flags):
                    self._send_rest(entry)
            of_entries = [[self._results(each, at) for at in range(len(each.results))] for each in self._entries]
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
                entry.gradients.partial = None
                if not self._stays_partial(entry.unit):
                    add(entry.unit, of_dtypes, found)
                elif found:
                    entry.gradients.partial = WaitingSums(entry.unit)
                    entry.gradients.partial.matrices = dict(enumerate(zip(*of_dtypes, strict=True)))
                    entry.gradients.partial.present.update(found)
                    entry.gradients.partial.note()

    def _send_rest(self, entry: _UnitEntry) -> None:
        for at, (_, layout, _) in enumerate(entry.unit.groups):
            dtype, numel = entry.sent_dtype(at), self._machines.shard_size * layout.numel
            rest = entry.rest[at] or [torch.zeros(numel, dtype=dtype, device=device) for device in self._devices]
            entry.rest[at] = self._launch(entry, [self._staged(entry, total.to(dtype)) for total in rest])

    def _results(self, entry: _UnitEntry, at: int) -> list[Tensor]:
        """Waits for the sums of all owners, and returns them in the dtype in which they are added."""
        dtype = added_in(entry.sent_dtype(at), entry.unit.groups[at][2])
        sums = [_received(result, self._devices[i]).to(dtype) for i, result in enumerate(entry.results[at])]
        for i, result in enumerate(entry.rest[at]):
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

    def _stays_partial(self, unit: ShardedUnit) -> bool:
        return self._replicate is not None and not unit.requires_all_reduce


def _received(result: Any, device: torch.device) -> Tensor:
    tensor: Tensor = result if isinstance(result, Tensor) else result.wait()
    return tensor.to(device, non_blocking=True)


def make_outputs(
    tensors: Sequence[Tensor],
    device: torch.device,
    receive: Callable[[int, Sequence[Tensor | None]], None],
    slot: int,
) -> None:
    """Makes ``tensors``, parameters of a unit on a ``slot``, outputs of a node whose backward calls ``receive``.

    The engine runs the node, in the thread of the slot's device, once it has all gradients of the unit on the slot.
    From then on the parameters are not needed any more. The node lives as long as the parameters. It refers weakly to
    the object of the method ``receive``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        handle = torch.empty(0, device=device, requires_grad=True)
        ToOwners.apply(handle, list(tensors), weakref.WeakMethod(receive), slot)


class ToOwners(Node):
    """The node of `make_outputs`."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, tensors: list[Tensor], receive: weakref.WeakMethod[Any], slot: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.receive, ctx.slot = receive, slot
        run_first(ctx)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        """Passes their gradients on."""
        receive = ctx.receive()
        if receive is None:
            raise RuntimeError(
                "the parameters that this graph uses are gone: their module is, or before its next call one of them "
                "was replaced, or its requires_grad or dtype was changed. Call backward() before that, or call the "
                "module again"
            )
        if any(grad is not None for grad in grads):
            receive(ctx.slot, grads)
        return None, None, None, None


CHOSEN = object()
"""The key in a pass's ``contents`` under which are the ids of the parameters that ``backward(inputs=...)`` names."""


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
    leaves = [leaf for each, leaf in _units_behind(roots) if any(each.takes(i, chosen) for i in each.unit.trainable)]
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


def _units_behind(roots: Sequence[Any]) -> Iterator[tuple[UnitGradients, Any]]:
    """Finds the nodes of units behind these nodes: yields the units' gradients, each with the leaf behind its node."""
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
