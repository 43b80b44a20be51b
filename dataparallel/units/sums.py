"""Adds up what the slots have delivered for one unit, each owner its part.

Owner j starts with its own row and adds those of slots j + 1, j + 2, ..., j - 1. So at any time all owners pull from
distinct slots, and the order is the same in every run. The result is the owner's part of each gradient. It is added to
``.grad`` of the sharded parameters, or becomes it.

The summing streams wait for an event after all matrices were written. Matrices and the memory of the result belong to
the computing streams of their devices, which wait for the sums before that memory is used again (`SumsOfPass`). Only
``units.gradients`` uses this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.devices import CPU
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.streams.current import Event, current_streams, streams_set
from dataparallel.units.deliveries import Delivery, Group, OfUnit, SumsOfPass, added_in
from dataparallel.units.lines import Lines, wait_for
from dataparallel.units.no_room import named_if_no_room
from dataparallel.units.summed import Summed

__all__ = ["UnitSums"]

_RECEIVED_TOGETHER = 2**17
"""Bytes of rows that an owner receives by one call: calls for small rows take longer than the rows."""

_ADDED_ON_ONE = 2**16
"""Bytes of a slot's gradients up to which one slot adds those of all: launches take longer than so few bytes."""


class UnitSums:
    """The sums of one unit. One thread at a time uses it.

    Args:
        unit: the unit.
        groups: its parameters that need gradients, for each dtype.
        order: for each of these parameters its position among the gradients that a slot delivers.
        lines: the streams of the tree.

    Attributes:
        is_torn: `add_up` has failed when some owners had added their part to gradients that were there already.
    """

    def __init__(self, unit: OfUnit, groups: Sequence[Group], order: Mapping[int, int], lines: Lines) -> None:
        self._unit, self._groups, self._order, self._lines = unit, groups, order, lines
        self.is_torn = False
        sizes = [layout.owners * layout.numel * unit.dtype_of_sums(dtype).itemsize for _, layout, dtype in groups]
        are_apart = len({*lines.slots}) == len(lines.slots) > 2 and CPU not in lines.slots
        # Sums that are scattered over machines have other rows.
        self._is_small = are_apart and sum(sizes) <= _ADDED_ON_ONE and unit.sharded_over[0] == 1

    @property
    def full_bytes(self) -> int:
        """The size of one slot's gradients."""
        return sum(layout.owners * layout.numel * dtype.itemsize for _, layout, dtype in self._groups)

    def begun(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a sum, which begins as ``row``. Small ones have no values yet: most are not added here."""
        return torch.empty_like(row, dtype=dtype) if self._is_small else row.to(dtype, copy=True)

    def add_up(self, found: Mapping[int, Delivery], sums: SumsOfPass) -> None:
        """Launches the sums of one round."""
        present = [any(of_slots) for of_slots in zip(*(found[slot].present for slot in sorted(found)), strict=True)]
        lines, slots = self._lines, self._lines.slots
        made = lines.meet("deliveries", [delivery.made for delivery in found.values() if delivery.made is not None])
        in_flight = [*found.items()]
        owns: list[Delivery] = []
        orders: list[list[int]] = []  # for each owner the slots whose rows it adds to its own
        totals: list[list[Tensor]] = [[] for _ in self._groups]  # for each dtype the parts of all owners
        with torch.no_grad():
            for owner in range(len(slots)):
                order = [s for s in ((owner + i) % len(slots) for i in range(len(slots))) if s in found]
                own = found.get(owner)
                if own is None or not own.sums:
                    if own is None:
                        sums.release(owner)  # zeros of an earlier unit: this owner's slot delivers nothing itself
                    own = self._zeros(owner, found, sums)
                    in_flight.append((owner, own))
                else:
                    order.remove(owner)
                owns.append(own)
                orders.append(order)
                if (stream := lines.summing[owner]) is not None:
                    # `own` was made after all that the computing stream did to gradients that there are already.
                    # Copies to this stream begin after it, so the streams on which they leave need not wait.
                    wait_for([event for event in {made, own.made} if event is not None], [stream])
            try:
                if self._is_small and len(found) == len(slots):
                    self._add_on_one(found, owns, totals, present, sums)
                else:
                    self._add_rows(found, owns, orders, totals, present, sums)
            except BaseException:
                self.is_torn = any(totals) and not self._unit.is_offloaded and sums.over_machines is None
                # Deliveries are dropped now, which sums that have been launched read.
                launched = [Event(stream) for stream in lines.summing if stream is not None]
                wait_for(launched, sums.computing.values())
                raise
        read = sums.latest = lines.meet("sums", sums.added.values())  # each follows the copies to its stream
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
        for owner in range(len(self._lines.slots)):
            self._add_to_gradients(owner, totals, present, summed)
        self._set_gradients(totals, present, summed)

    def _zeros(self, owner: int, found: Mapping[int, Delivery], sums: SumsOfPass) -> Delivery:
        """A delivery of zeros, for an owner whose slot has no memory for a sum."""
        device = self._lines.slots[owner]
        like = next(iter(found.values())).matrices
        with streams_set({device: sums.computing[device]} if device in sums.computing else {}):
            zeros = [
                torch.zeros(matrix.shape[1], dtype=added_in(matrix.dtype, dtype), device=device)
                for matrix, (_, _, dtype) in zip(like, self._groups, strict=True)
            ]
            parts = [
                zero if zero.dtype == dtype else torch.empty_like(zero, dtype=dtype)
                for zero, (_, _, dtype) in zip(zeros, self._groups, strict=True)
            ]
            made = [Event(stream) for stream in current_streams([device]).values()]
        return Delivery([], zeros, parts, [], made[0] if made else None)

    def _add_rows(
        self,
        found: Mapping[int, Delivery],
        owns: Sequence[Delivery],
        orders: Sequence[Sequence[int]],
        totals: Sequence[list[Tensor]],
        present: Sequence[bool],
        sums: SumsOfPass,
    ) -> None:
        """Each owner adds to its own row those of the slots in its order. The parts go into ``totals``.

        Owners take turns: links serve copies in the order of their launches, and the owners' are distinct.
        """
        lines, slots = self._lines, self._lines.slots
        most = max(map(len, orders))
        together, size = self._received_together(), self.full_bytes // len(slots)
        for first in range(0, max(most, 1), together):
            for owner, (own, order) in enumerate(zip(owns, orders, strict=True)):
                few = order[first : first + together]
                no_room = named_if_no_room("summed gradients", self._unit.name, slots[owner], size)
                with streams_set(lines.adding(owner, [slots[slot] for slot in few])), no_room:
                    for at, total in enumerate(own.sums):
                        if first == 0 and self._is_small and own.matrices:
                            total.copy_(own.matrices[at][owner])
                        self._add([found[slot].matrices[at][owner] for slot in few], total)
                    if first + together >= most:
                        self._end_sum(owner, own, totals, present, sums)
                        if (stream := lines.summing[owner]) is not None:
                            sums.added[owner] = Event(stream)

    def _add_on_one(
        self,
        found: Mapping[int, Delivery],
        owns: Sequence[Delivery],
        totals: Sequence[list[Tensor]],
        present: Sequence[bool],
        sums: SumsOfPass,
    ) -> None:
        """`_add_rows` for few bytes: one slot receives all and adds for all owners, in the same order.

        This takes four launches for each slot, where each owner by itself takes two for each other slot.
        """
        lines, slots = self._lines, self._lines.slots
        count, here = len(slots), len(sums.summed) % len(slots)  # units use distinct slots
        streams = {device: s for device, s in zip(slots, lines.summing, strict=True) if s is not None}
        no_room = named_if_no_room("summed gradients", self._unit.name, slots[here], count * self.full_bytes)
        with streams_set(streams), no_room:
            for at in range(len(self._groups)):
                matrices = [found[slot].matrices[at] for slot in range(count)]
                received = matrices[here].new_empty(count, *matrices[here].shape)
                comm.copy_each(received.unbind(), matrices)
                rows = received.flatten(0, 1)  # that of slot s for owner j is at s * count + j
                total = rows[:: count + 1].to(owns[here].sums[at].dtype, copy=True)
                for i in range(1, count):  # that of slot j + i for owner j, and where this is too large, j + i - count
                    total[: count - i].add_(rows[i * count :: count + 1])
                    total[count - i :].add_(rows[count - i : i * count : count + 1])
                comm.scatter(total.flatten(), out=[own.sums[at] for own in owns])
            for owner, own in enumerate(owns):
                self._end_sum(owner, own, totals, present, sums)
                sums.added[owner] = Event(streams[slots[owner]])

    def _received_together(self) -> int:
        """How many rows an owner receives by one call."""
        most = max(
            (layout.numel * self._unit.dtype_of_sums(dtype).itemsize for _, layout, dtype in self._groups), default=0
        )
        return max(1, _RECEIVED_TOGETHER // max(most, 1))

    def _add(self, rows: Sequence[Tensor], total: Tensor) -> None:
        """Adds the rows to ``total`` one after the other."""
        rows = [*rows]
        away = [i for i, row in enumerate(rows) if row.device != total.device]
        if away:
            received = torch.empty(len(away), *total.shape, dtype=rows[0].dtype, device=total.device).unbind()
            comm.copy_each(received, [rows[i] for i in away])
            for i, row in zip(away, received, strict=True):
                rows[i] = row
        for row in rows:
            total.add_(row)

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
                    sums_to.append(grad.shards[owner])
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
