"""`PeerTables`: the tables by which the slots of a unit gather parameters and sum gradients where kernels read peers.

A slot pulls its full parameters straight from the owners' shards by one launch. An owner sums its rows straight from
where autograd left the gradients, by one launch too. Without such kernels ``buffers`` packs, copies and unpacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from dataparallel.comm.kernels import ADDRESSES, DeviceTable, kernel_for
from dataparallel.comm.tables import Part, all_gather, reduce_scatter
from dataparallel.sharded.units.buffers import Layout, added_in

if TYPE_CHECKING:
    from dataparallel.sharded.units.gradients import Delivery, DtypeGroup
    from dataparallel.sharded.units.unit import Unit


def parts_of(layout: Layout) -> list[Part]:
    """Describes how the parameters of a layout are cut, for the plans of ``comm.tables``."""
    return [
        Part(columns.start, in_full, tuple(shape.numel() for shape in columns.shard_shapes))
        for columns, in_full in zip(layout.columns, layout.full_offsets, strict=True)
    ]


class _Sum(NamedTuple):
    """The sum of some parameters of one dtype for one owner, by one launch: of those from ``first`` up to ``end``."""

    first: int
    end: int
    parts: list[Part]
    table: DeviceTable


class PeerTables:
    """The tables of one unit, on the devices that launch them. The constructor copies them there, on current streams.

    Each owner needs a table for the sums of each dtype, and each slot one for each dtype that it gathers.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._gathers: dict[tuple[int, int, int], DeviceTable] = {}
        for slot in range(len(unit.slots)):
            for at, owned in enumerate(unit.owned):
                self.gather(slot, at, owned.layout)
        self._sums = [
            [self._sums_of(owner, group) for owner in range(len(unit.slots))] for group in unit.gradients.groups
        ]

    def gather(self, slot: int, at: int, layout: Layout) -> DeviceTable:
        """Returns the table for dtype number ``at`` by which a slot pulls the pieces of a layout into its full buffer.

        A table for pieces of a group of slots is made when it is first asked for, on the slot's current stream.
        """
        key = slot, at, layout.owners
        if key not in self._gathers:
            dtype = self._unit.dtype_on_slots(self._unit.owned[at].dtype)
            plan = all_gather(parts_of(layout), slot % layout.owners)
            self._gathers[key] = DeviceTable(plan, self._unit.slots[slot], dtype)
        return self._gathers[key]

    def _sums_of(self, owner: int, group: DtypeGroup) -> list[_Sum]:
        unit, (_, layout, dtype) = self._unit, group
        slots, sum_dtype, parts = len(unit.slots), unit.dtype_of_sums(dtype), parts_of(layout)
        at_once = (ADDRESSES - 2) // slots  # parameters of one launch
        sums = []
        for first in range(0, len(parts), at_once):
            some = parts[first : first + at_once]
            plan = reduce_scatter(some, owner, slots)
            if kernel_for(plan, sum_dtype, added_in(sum_dtype, dtype)) is None:
                return []
            table = DeviceTable(plan, unit.slots[owner], sum_dtype, added_in(sum_dtype, dtype))
            sums.append(_Sum(first, first + len(some), some, table))
        return sums

    def has_sums(self, at: int) -> bool:
        """Returns true if kernels add the gradients of parameters of dtype number ``at``."""
        return bool(self._sums[at][0])  # all owners have alike

    def reduce_scatter(self, at: int, owner: int, deliveries: Sequence[Delivery | None], total: Tensor) -> None:
        """Adds the owner's rows of what the slots have delivered into ``total``, on the current stream of its device.

        ``deliveries``: of each slot, ``None`` if it has none. Where no slot has a gradient, ``total`` stays as it is.
        """
        layout = self._unit.gradients.groups[at][1]
        for first, end, parts, table in self._sums[at][owner]:
            tensors: list[Tensor | None] = []
            shifts: list[int] = []
            for delivery in deliveries:
                matrix = None if delivery is None else delivery.matrices[at]
                if matrix is not None:
                    tensors += [matrix] * len(parts)
                    # In a matrix the owner's rows of all parameters follow each other.
                    shifts += [owner * layout.numel + part.in_shard - sum(part.counts[:owner]) for part in parts]
                else:
                    tensors += [None] * len(parts) if delivery is None else delivery.loose[at][first:end]
                    shifts += [0] * len(parts)
            table.launch([*tensors, total], [*shifts, 0])
