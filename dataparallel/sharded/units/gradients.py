"""The gradients of one unit: each slot delivers its own, and when all have, each owner adds its part of them.

A slot copies its gradients into a matrix with a row for each owner (`Delivery`). It belongs to the computing stream of
its device. Before the slot's next delivery of any unit that stream waits for the sums that read the last one
(`SumsOfPass.release`), so two matrices are in memory at most.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, current_streams, streams_joined, streams_set
from dataparallel.profiling import stage
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import Layout, naming_out_of_memory
from dataparallel.sharded.units.sums import Delivery, Group, PassGradients, UnitSums, added_in

if TYPE_CHECKING:
    from dataparallel.sharded.units.passes import SumsOfPass
    from dataparallel.sharded.units.unit import Unit


class FormerGrad:
    """A parameter's ``.grad`` as it was when gradients were held for it, on the current streams: the computing ones.

    They are dropped if the user throws that ``.grad`` away. Where there is none it becomes zeros.
    """

    def __init__(self, parameter: ShardedTensor) -> None:
        if parameter.grad is None:
            # An operator on sharded tensors would run on other streams in a backward.
            zeros = [torch.zeros_like(shard) for shard in parameter._shards]
            parameter.grad = ShardedTensor(zeros, parameter.placement, parameter.shape, devices=parameter.devices)
        self._grad, self._zeroed = weakref.ref(parameter.grad), parameter.grad._zeroed

    def is_void(self, parameter: ShardedTensor) -> bool:
        """True if the parameter's ``.grad`` is another one now, or ``zero_`` was called on it."""
        grad = parameter.grad
        return grad is None or self._grad() is not grad or grad._zeroed != self._zeroed


class PartialSums:
    """Sums of one unit that wait for those of other machines. They belong to the computing streams, which are current.

    Args:
        groups: the parameters that need gradients, for each dtype.
        parameters: of the unit.
        totals: for each dtype the parts of all owners on this machine.
        present: positions of the parameters that have gradients.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        parameters: Sequence[ShardedTensor],
        totals: Sequence[Sequence[Tensor]],
        present: Iterable[int],
    ) -> None:
        self._groups, self._parameters, self.totals = groups, parameters, totals
        self._former = {i: FormerGrad(parameters[i]) for i in present}

    @property
    def present(self) -> Collection[int]:
        """Positions of the parameters that have gradients."""
        return self._former

    def drop_void(self) -> None:
        """Drops gradients whose ``.grad`` the user has thrown away or zeroed."""
        for i in [i for i, former in self._former.items() if former.is_void(self._parameters[i])]:
            del self._former[i]
            for (kept, layout, _), of_owners in zip(self._groups, self.totals, strict=True):
                if i in kept:
                    for flat in of_owners:
                        layout.zero_columns(kept.index(i), flat)


class UnitGradients:
    """The gradients of one unit, for any thread.

    A unit may be reached several times in one pass: a slot's first delivery belongs with the first ones of other slots,
    its second with their second, and so on. What a slot still misses at the end of the pass counts as zero. While
    gradients are not synchronised, a slot's deliveries are added on the slot and stay there (`_held`).

    Attributes:
        groups: for each dtype the parameters that need gradients, and their layout.
        full_bytes: the size of one slot's gradients.
        partial: sums of this machine, or of its shard group, that wait for those of other machines.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        # While a slot's gradients are packed, with those that it holds: on the CPU passes of several threads deliver.
        self._packing = [threading.Lock() for _ in unit.slots]
        parts, part = unit.sharded_over
        needs = {*unit.recorded}
        self.groups: list[Group] = []
        for indices, owned in zip(unit.indices, unit.owned, strict=True):
            kept = [i for i in indices if i in needs]
            if kept:
                shapes, cuts = [unit.shapes[i] for i in kept], [unit.cuts[i] for i in kept]
                layout = Layout(shapes, cuts, len(unit.slots), machines=parts, machine=part)
                self.groups.append((kept, layout, owned.dtype))
        self.full_bytes = sum(layout.owners * layout.numel * dtype.itemsize for _, layout, dtype in self.groups)
        self._sums = UnitSums(unit, self.groups)
        self._rounds: list[dict[int, Delivery]] = []
        self._delivered: dict[int, int] = {}
        self._held: dict[int, Delivery] = {}
        self._new: set[int] = set()  # slots whose held gradients are of this pass alone
        self._former: dict[int, FormerGrad] = {}
        self.partial: PartialSums | None = None
        self._lost: dict[int, FormerGrad] = {}  # parameters whose gradients are incomplete until they are zeroed

    def deliver(self, slot: int, grads: Sequence[Tensor | None], sums: SumsOfPass) -> bool | None:
        """Takes the gradients of one slot, in the order of ``unit.recorded``, and adds up if it is the last.

        The current stream has the gradients: that of the graph, which may be older than the pass. The pass's computing
        stream takes them, so everything that is made here belongs to it. Returns true if they have been added up, false
        if they wait for other slots, and ``None`` if they stay on the slot.
        """
        device = self._unit.slots[slot]
        joined = streams_joined({device: sums.computing[device]} if device in sums.computing else {})
        with stage("reduce_add", slot=slot), self._packing[slot], joined:
            return self._take(slot, grads, sums)

    def _take(self, slot: int, grads: Sequence[Tensor | None], sums: SumsOfPass) -> bool | None:
        """`deliver` on the computing stream of the pass."""
        sums.release(slot)
        is_new = slot not in self._held or slot in self._new
        with naming_out_of_memory("gradients", self._unit.name, self._unit.slots[slot], self.full_bytes):
            delivery = self._packed(slot, grads)
        with self._lock:
            if not self._unit.requires_gradient_sync:
                self._held[slot] = delivery  # with what was there
                if is_new:
                    self._new.add(slot)
                return None
            held = self._held.pop(slot, None)
            if held is not None:
                sums.put_back[id(self), slot] = partial(self._put_back, slot, held)
            number = self._delivered.get(slot, 0)
            self._delivered[slot] = number + 1
            while len(self._rounds) <= number:
                self._rounds.append({})
            self._rounds[number][slot] = delivery
            if len(self._rounds[number]) == sums.slots:
                # Under the lock: later rounds of this unit are added after this one.
                found, self._rounds[number] = self._rounds[number], {}
                self._add_up(found, sums)
                return True
            return False

    def end_pass(self, sums: SumsOfPass | None) -> None:
        """Adds up what waits, in the order of the slots.

        With ``None`` the pass has failed, and what waits for other slots is dropped, and what it has left on the slots.
        Gradients that earlier passes left there stay, with what has been added to them; those that were to be added up
        are put back by `SumsOfPass.drop_all`.
        """
        with self._lock:
            new, self._new = self._new, set()
            rounds, self._rounds, self._delivered = self._rounds, [], {}
            if sums is None:
                for slot in new:
                    self._held.pop(slot, None)
                self._note_held()
                return
            if self._unit.requires_gradient_sync and self._held:
                held, self._held = self._held, {}
                for slot, delivery in held.items():
                    sums.put_back[id(self), slot] = partial(self._put_back, slot, delivery)
                rounds.append(held)
            for found in rounds:
                if found:
                    self._add_up(found, sums)
            self._former = {}
            with streams_set(sums.computing):
                self._note_held()

    def _add_up(self, found: dict[int, Delivery], sums: SumsOfPass) -> None:
        """Adds up one round. From then on, or if that fails, nothing has to be put back for its slots."""
        are_kept = any((id(self), slot) in sums.put_back for slot in found)
        try:
            self._sums.add_up(found, sums, not are_kept)
        except BaseException:
            for slot in found:
                if (put_back := sums.put_back.pop((id(self), slot), None)) is not None:
                    put_back()
            if self._sums.is_torn:
                self._note_torn()
            raise
        # Those in host memory and over machines are added when the pass ends.
        if sums.put_back and not self._unit.is_offloaded and sums.over_machines is None:
            for slot in found:
                sums.put_back.pop((id(self), slot), None)

    def _put_back(self, slot: int, held: Delivery) -> None:
        """Leaves gradients of earlier passes on the slot again."""
        self._held[slot] = held

    def note_lost(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        """Notes that gradients are incomplete until the user has zeroed them: those of a ``backward()`` are missing.

        ``computing``: the computing streams. Where there is no ``.grad`` it becomes zeros, which the user may drop.
        """
        with self._lock, streams_set(computing), torch.inference_mode(False), torch.no_grad():
            self._lost.update({i: FormerGrad(self._unit.parameters[i]) for i in self._unit.recorded})
            self._sums.is_torn = False

    def _note_torn(self) -> None:
        """Notes that what was added to gradients is incomplete."""
        parameters = self._unit.parameters
        self._lost.update({i: FormerGrad(parameters[i]) for i in self._unit.recorded if parameters[i].grad is not None})
        self._sums.is_torn = False

    def refuse_lost(self) -> None:
        """Raises if gradients are incomplete and have not been zeroed.

        Raises:
            RuntimeError: they are.
        """
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
        """True if gradients wait on the slots for the next sum, or with the owners for that over machines."""
        return bool(self._held) or self.partial is not None

    def drop_void(self) -> None:
        """Drops gradients that are held on the slots if the user has thrown away those that they would be added to.

        ``.grad`` says so: it is ``None``, another tensor, or has been set to zero since they were held.
        """
        with self._lock:
            for i in [i for i, former in self._former.items() if former.is_void(self._unit.parameters[i])]:
                del self._former[i]
                for delivery in self._held.values():
                    delivery.present.discard(i)
                    for (kept, layout, _), matrix in zip(self.groups, delivery.matrices, strict=True):
                        if i in kept:
                            layout.zero_columns(kept.index(i), matrix.view(layout.owners, layout.numel))
            self._held = {slot: held for slot, held in self._held.items() if held.present}
            if self.partial is not None:
                self.partial.drop_void()
                self.partial = self.partial if self.partial.present else None

    def set_sums(self, totals: Sequence[Sequence[Tensor]], present: Collection[int], summed: PassGradients) -> None:
        """Adds what has been added up over machines to ``.grad``, on the current streams."""
        with self._lock:
            self._sums.add_parts(totals, present, summed)

    def _note_held(self) -> None:
        """Notes to which ``.grad`` the held gradients belong. The computing streams are current."""
        for i in sorted({i for held in self._held.values() for i in held.present}):
            self._former[i] = FormerGrad(self._unit.parameters[i])

    def _packed(self, slot: int, grads: Sequence[Tensor | None]) -> Delivery:
        """The slot's delivery, with what is held on it.

        Raises:
            TypeError: a gradient is sparse.
        """
        self._refuse_sparse(grads)
        unit, device, held = self._unit, self._unit.slots[slot], self._held.get(slot)
        of_parameter = dict(zip(unit.recorded, grads, strict=True))
        matrices: list[Tensor] = []
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for at, (kept, layout, dtype) in enumerate(self.groups):
            summed = unit.dtype_of_sums(dtype)
            matrix = torch.empty(layout.owners, layout.numel, dtype=summed, device=device)
            layout.copy_in([of_parameter[i] for i in kept], matrix)
            matrix = matrix.view(len(unit.slots), -1)  # what an owner sums, for all machines, is a row
            if held is not None:
                matrix.add_(held.matrices[at])
            matrices.append(matrix)
            if unit.requires_gradient_sync:
                total = torch.empty_like(matrix[slot], dtype=added_in(summed, dtype))
                is_part = unit.machines is not None or total.dtype == dtype
                sums.append(total)
                parts.append(total if is_part else torch.empty_like(total, dtype=dtype))
        present = {i for i, grad in of_parameter.items() if grad is not None}
        if held is not None:
            present |= held.present
        stream = current_streams([device]).get(device)
        return Delivery(matrices, sums, parts, present, None if stream is None else Event(stream))

    def _refuse_sparse(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in zip(self._unit.recorded, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {list(self._unit.shapes[i])} in {self._unit.name!r} has the "
                    f"layout {grad.layout}, and sharded parameters get dense gradients: pass sparse=False to the "
                    "Embedding"
                )
