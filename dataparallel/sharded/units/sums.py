"""Adds up what the slots have delivered for one unit, and gives each owner its part of the sum.

The sum is made for all owners by one call (``comm.reduce_scatter``), in slot order, so it has the same bits in every
run. An owner's part is added to ``.grad`` of the sharded parameters, or becomes it.

The streams that add wait for an event after all matrices were written. Matrices and the memory of the result belong to
the computing streams of their devices, which wait for the sums before that memory is used again (`SumsOfPass`). Only
``units.gradients`` uses this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.deliveries import Delivery, Group, Summed, SumsOfPass, added_in
from dataparallel.sharded.units.memory import named_if_no_room
from dataparallel.sharded.units.streams import TreeStreams, wait_for

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


class UnitSums:
    """The sums of one unit. One thread at a time uses it.

    Args:
        unit: the unit.
        groups: its parameters that need gradients, for each dtype.
        order: for each of these parameters its position among the gradients that a slot delivers.
        tree_streams: the streams of the tree.

    Attributes:
        is_torn: `add_up` has failed when some owners had added their part to gradients that were there already.
    """

    def __init__(
        self, unit: Unit, groups: Sequence[Group], order: Mapping[int, int], tree_streams: TreeStreams
    ) -> None:
        self._unit, self._groups, self._order, self._tree_streams = unit, groups, order, tree_streams
        self.is_torn = False

    @property
    def full_bytes(self) -> int:
        """The size of one slot's gradients."""
        return sum(layout.owners * layout.numel * dtype.itemsize for _, layout, dtype in self._groups)

    def add_up(self, found: Mapping[int, Delivery], sums: SumsOfPass, overwrite: bool) -> None:
        """Launches the sums of one round.

        ``overwrite``: nobody needs what slots have delivered if that fails.
        """
        present = [any(of_slots) for of_slots in zip(*(found[slot].present for slot in sorted(found)), strict=True)]
        tree_streams, slots = self._tree_streams, self._tree_streams.slots
        made = tree_streams.meet(
            "deliveries", [delivery.made for delivery in found.values() if delivery.made is not None]
        )
        in_flight = [*found.items()]
        owns: list[Delivery] = []
        new: list[Event] = []
        totals: list[list[Tensor]] = [[] for _ in self._groups]  # for each dtype the parts of all owners
        with torch.no_grad():
            for owner in range(len(slots)):
                own = found.get(owner)
                if own is None or not own.sums:
                    if own is None:
                        sums.release(owner)  # what follows is for an earlier unit: its slot delivers nothing itself
                    own = self._room(owner, found, sums)
                    in_flight.append((owner, own))
                    new += [] if own.made is None else [own.made]
                owns.append(own)
            # All matrices, and the memory of the sums, were made after all that the computing streams did to gradients
            # that there are already.
            wait_for(new if made is None else [made, *new], tree_streams.adding.values())
            try:
                self._add(found, owns, overwrite)
                for owner, own in enumerate(owns):
                    stream = tree_streams.adding.get(slots[owner])
                    with streams_set({} if stream is None else {slots[owner]: stream}):
                        self._end_sum(owner, own, totals, present, sums)
                    if stream is not None:
                        sums.added[owner] = Event(stream)
            except BaseException:
                self.is_torn = any(totals) and not self._unit.is_offloaded and sums.over_machines is None
                # Deliveries are dropped now, which sums that have been launched read.
                launched = [Event(stream) for stream in tree_streams.adding.values()]
                wait_for(launched, sums.computing.values())
                raise
        read = sums.latest = tree_streams.meet("sums", sums.added.values())  # each follows the copies to its stream
        for slot, delivery in in_flight:
            sums.hold(slot, delivery, [] if read is None else [read])
        if sums.over_machines is not None:
            sums.over_machines.came(self._unit, present)
            return
        if self._unit.is_offloaded:
            for owner in range(len(slots)):
                sums.waiting.append(partial(self._add_to_gradients, owner, totals, present, sums.summed))
            sums.waiting.append(partial(self._set_gradients, totals, present, sums.summed))
        else:
            self._set_gradients(totals, present, sums.summed)
        summed = [i for kept, _, _ in self._groups for i in kept if present[self._order[i]]]
        sums.summed.note(map(self._unit.parameters.__getitem__, summed))

    def set(self, totals: Sequence[Sequence[Tensor]], present: Sequence[bool], summed: Summed) -> None:
        """Adds the owners' parts to gradients, or makes them that, on the current streams."""
        for owner in range(len(self._tree_streams.slots)):
            self._add_to_gradients(owner, totals, present, summed)
        self._set_gradients(totals, present, summed)

    def _room(self, owner: int, found: Mapping[int, Delivery], sums: SumsOfPass) -> Delivery:
        """A delivery without gradients, for an owner whose slot has no memory for a sum."""
        device = self._tree_streams.slots[owner]
        like = next(iter(found.values())).matrices
        with streams_set({device: sums.computing[device]} if device in sums.computing else {}):
            memory = [
                self._memory([matrix.shape[1]], added_in(matrix.dtype, dtype), device)
                for matrix, (_, _, dtype) in zip(like, self._groups, strict=True)
            ]
            parts = [
                total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
                for total, (_, _, dtype) in zip(memory, self._groups, strict=True)
            ]
            made = [Event(stream) for stream in current_streams([device]).values()]
        return Delivery([], memory, parts, [], made[0] if made else None)

    def _add(self, found: Mapping[int, Delivery], owns: Sequence[Delivery], overwrite: bool) -> None:
        """Launches the sums of all dtypes, into the memory that the owners have for them."""
        with streams_set(self._tree_streams.adding):
            for at in range(len(self._groups)):
                matrices = [found[slot].matrices[at] for slot in sorted(found)]
                comm.reduce_scatter(matrices, [own.sums[at] for own in owns], self._memory, overwrite)

    def _memory(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with named_if_no_room(
            "summed gradients", self._unit.name, device, self.full_bytes // len(self._tree_streams.slots)
        ):
            return torch.empty(shape, dtype=dtype, device=device)

    def _end_sum(
        self, owner: int, own: Delivery, totals: Sequence[list[Tensor]], present: Sequence[bool], sums: SumsOfPass
    ) -> None:
        """The owner has added all rows: its part goes into ``totals``, and to gradients that there are already.

        Over machines it is sent instead.
        """
        unit = self._unit
        factor = unit.gradient_divide_factor * (1 if unit.machines is None else unit.machines.ranks)
        for at, (total, part, of_owners) in enumerate(zip(own.sums, own.parts, totals, strict=True)):
            if factor != 1:
                total.div_(factor)
            if sums.over_machines is not None:
                sums.over_machines.take(unit, at, owner, total)
                continue
            if unit.all_reduce_hook is not None:
                unit.all_reduce_hook(total)
            if part is not total:
                part.copy_(total)
            of_owners.append(unit.to_host(part) if unit.is_offloaded else part)
        if sums.over_machines is None and not unit.is_offloaded:
            sums.added_to += self._add_to_gradients(owner, totals, present, sums.summed)

    def _add_to_gradients(
        self, owner: int, totals: Sequence[Sequence[Tensor]], present: Sequence[bool], summed: Summed
    ) -> list[Tensor]:
        """Adds the owner's part to gradients that there are already, and returns the owner's parts of these."""
        sums_to: list[Tensor] = []
        additions: list[Tensor] = []
        for (kept, layout, _), of_owners in zip(self._groups, totals, strict=True):
            grads = [summed.gradient_of(self._unit.parameters[i]) for i in kept]
            if all(grad is None for grad in grads):
                continue
            for i, grad, part in zip(kept, grads, layout.parts_of(of_owners[owner], owner), strict=True):
                if grad is not None and present[self._order[i]]:
                    sums_to.append(grad._shards[owner])
                    additions.append(part)
        if sums_to:
            _torch.foreach_add_(sums_to, additions)
        return sums_to

    def _set_gradients(self, totals: Sequence[Sequence[Tensor]], present: Sequence[bool], summed: Summed) -> None:
        """Makes the parts the gradients of parameters that have none."""
        for (kept, layout, _), of_owners in zip(self._groups, totals, strict=True):
            if all(summed.gradient_of(self._unit.parameters[i]) is not None for i in kept):
                continue
            parts = [layout.parts_of(flat, owner) for owner, flat in enumerate(of_owners)]
            for at, i in enumerate(kept):
                parameter = self._unit.parameters[i]
                if summed.gradient_of(parameter) is None and present[self._order[i]]:
                    of_parameter = [of_owner[at] for of_owner in parts]
                    whole = ShardedTensor(of_parameter, parameter.placement, parameter.shape, devices=parameter.devices)
                    summed.set_gradient(parameter, whole)
