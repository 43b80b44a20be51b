"""The gradients of one unit: each slot delivers its own, and when all have, each owner adds its part of them.

A slot copies its gradients into a matrix with a row for each owner (`Delivery`). When all slots of the pass have
delivered, `UnitSums` adds them up. A parameter without a gradient on every slot has none.

A unit may be reached several times in one pass: a slot's first delivery belongs with the first ones of other slots, its
second with their second, and so on. What a slot still misses at the end of the pass counts as zero
(`UnitGradients.end`). While gradients are not synchronised, a slot's deliveries are added on the slot and stay there
(`_held`).

The matrix belongs to the computing stream of its device. Before the slot's next delivery of any unit that stream waits
for the sums that read the last one (`SumsOfPass.release`), so two matrices are in memory at most. At the end of the
pass all computing streams wait for all sums.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, current_streams, streams_joined, streams_set
from dataparallel.profiling import stage
from dataparallel.sharded.units.deliveries import Delivery, Group, Summed, SumsOfPass, added_in
from dataparallel.sharded.units.layout import Layout
from dataparallel.sharded.units.memory import named_if_no_room
from dataparallel.sharded.units.partial_sums import FormerGrad, PartialSums, zeros_of
from dataparallel.sharded.units.streams import TreeStreams
from dataparallel.sharded.units.sums import UnitSums

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


class UnitGradients:
    """The gradients of one unit, for any thread.

    Args:
        unit: the unit; its parameters, dtypes and settings.
        recorded: positions of the parameters that need gradients.
        tree_streams: the streams of the tree.

    Attributes:
        groups: for each dtype the parameters that need gradients, and their layout.
        partial: sums of this machine, or of its shard group, that wait for those of other machines.
    """

    def __init__(self, unit: Unit, recorded: Sequence[int], tree_streams: TreeStreams) -> None:
        self._unit, self._tree_streams = unit, tree_streams
        self._lock = threading.Lock()
        # While a slot's gradients are packed, with those that it holds: on the CPU passes of several threads deliver.
        self._packing = [threading.Lock() for _ in tree_streams.slots]
        needs = set(recorded)
        self.recorded = list(recorded)
        self._order = {parameter: at for at, parameter in enumerate(recorded)}
        self.groups: list[Group] = []
        for indices, owned in zip(unit.indices, unit.owned, strict=True):
            kept = [i for i in indices if i in needs]
            if kept:
                parts, part = unit.sharded_over
                shapes, cuts = [unit.shapes[i] for i in kept], [unit.cuts[i] for i in kept]
                layout = Layout(shapes, cuts, len(tree_streams.slots), machines=parts, machine=part)
                self.groups.append((kept, layout, owned.dtype))
        self._sums = UnitSums(unit, self.groups, self._order, tree_streams)
        self._rounds: list[dict[int, Delivery]] = []
        self._delivered: dict[int, int] = {}
        self._held: dict[int, Delivery] = {}
        self._new: set[int] = set()  # slots whose held gradients are of this pass alone
        self._former: dict[int, FormerGrad] = {}
        self.partial: PartialSums | None = None  # what has been added up here and waits for other machines
        self._lost: dict[int, FormerGrad] = {}  # parameters whose gradients are incomplete until they are zeroed

    @property
    def full_bytes(self) -> int:
        """The size of one slot's gradients."""
        return self._sums.full_bytes

    def deliver(self, slot: int, grads: Sequence[Tensor | None], sums: SumsOfPass) -> bool | None:
        """Takes the gradients of one slot, in the order of ``recorded``, and adds up if it was the last to deliver.

        The current stream has the gradients: that of the graph, which may be older than the pass. The pass's computing
        stream takes them, so everything that is made here belongs to it. Returns true if they have been added up, false
        if they wait for other slots, and ``None`` if they stay on the slot.
        """
        device = self._tree_streams.slots[slot]
        joined = streams_joined({device: sums.computing[device]} if device in sums.computing else {})
        with stage("reduce_add", slot=slot), self._packing[slot], joined:
            return self._take(slot, grads, sums)

    def _take(self, slot: int, grads: Sequence[Tensor | None], sums: SumsOfPass) -> bool | None:
        """`deliver` on the computing stream of the pass."""
        sums.release(slot)
        is_new = slot not in self._held or slot in self._new
        with named_if_no_room("gradients", self._unit.name, self._tree_streams.slots[slot], self.full_bytes):
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

    def end(self, sums: SumsOfPass | None) -> None:
        """Adds up what waits, in the order of the slots.

        With ``None`` the pass has failed, and what waits for other slots is dropped, and what it has left on the slots.
        Gradients that earlier passes left there stay, with what has been added to them; those that were to be added up
        are put back by `SumsOfPass.drop`.
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
                self._note_lost()
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
            for i in self.recorded:
                if self._unit.parameters[i].grad is None:
                    self._unit.parameters[i].grad = zeros_of(self._unit.parameters[i])
            self._note_lost()

    def _note_lost(self) -> None:
        grads = {i: self._unit.parameters[i].grad for i in self.recorded}
        self._lost.update({i: FormerGrad(grad) for i, grad in grads.items() if grad is not None})
        self._sums.is_torn = False

    def refuse_lost(self) -> None:
        """Raises if gradients are incomplete and have not been zeroed.

        Raises:
            RuntimeError: they are.
        """
        if not self._lost:
            return
        with self._lock:
            self._lost = {i: f for i, f in self._lost.items() if not f.is_void(self._unit.parameters[i].grad)}
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
            void = [i for i, former in self._former.items() if former.is_void(self._unit.parameters[i].grad)]
            for i in void:
                del self._former[i]
                for delivery in self._held.values():
                    delivery.present[self._order[i]] = False
                    for (kept, layout, _), matrix in zip(self.groups, delivery.matrices, strict=True):
                        if i in kept:
                            place = layout.places[kept.index(i)]
                            rows = matrix.view(layout.owners, layout.numel)
                            rows[:, place.start : place.start + place.numel].zero_()
            self._held = {slot: held for slot, held in self._held.items() if any(held.present)}
            if self.partial is not None:
                self.partial.drop_void()
                self.partial = self.partial if self.partial.present else None

    def set_sums(self, totals: Sequence[Sequence[Tensor]], present: Sequence[bool], summed: Summed) -> None:
        """Adds what has been added up over machines to ``.grad``, on the current streams."""
        with self._lock:
            self._sums.set(totals, present, summed)

    def _note_held(self) -> None:
        """Notes to which ``.grad`` the held gradients belong. Where there is none it becomes zeros.

        Their memory belongs to the current streams, which are the computing ones.
        """
        for held in self._held.values():
            for i in self.recorded:
                if held.present[self._order[i]]:
                    parameter = self._unit.parameters[i]
                    if parameter.grad is None:
                        parameter.grad = zeros_of(parameter)
                    grad = parameter.grad
                    assert grad is not None
                    self._former[i] = FormerGrad(grad)

    def _packed(self, slot: int, grads: Sequence[Tensor | None]) -> Delivery:
        """The slot's delivery, with what is held on it.

        Raises:
            TypeError: a gradient is sparse.
        """
        self._refuse_sparse(grads)
        device = self._tree_streams.slots[slot]
        held = self._held.get(slot)
        matrices: list[Tensor] = []
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for at, (kept, layout, dtype) in enumerate(self.groups):
            summed = self._unit.dtype_of_sums(dtype)
            matrix = torch.empty(layout.owners, layout.numel, dtype=summed, device=device)
            layout.copy_in([grads[self._order[i]] for i in kept], matrix)
            matrix = matrix.view(len(self._tree_streams.slots), -1)  # what an owner sums, for all machines, is a row
            if held is not None:
                matrix.add_(held.matrices[at])
            matrices.append(matrix)
            if self._unit.requires_gradient_sync:
                sums.append(torch.empty_like(matrix[slot], dtype=added_in(summed, dtype)))
                is_sent = self._unit.machines is not None
                is_part = is_sent or sums[-1].dtype == dtype
                parts.append(sums[-1] if is_part else torch.empty_like(sums[-1], dtype=dtype))
        present = [grad is not None for grad in grads]
        if held is not None:
            present = [a or b for a, b in zip(present, held.present, strict=True)]
        stream = current_streams([device]).get(device)
        return Delivery(matrices, sums, parts, present, None if stream is None else Event(stream))

    def _refuse_sparse(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in zip(self.recorded, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {list(self._unit.shapes[i])} in {self._unit.name!r} has the "
                    f"layout {grad.layout}, and sharded parameters get dense gradients: pass sparse=False to the "
                    "Embedding"
                )
