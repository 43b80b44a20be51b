"""`PeerTables`: the tables by which the slots of a unit gather parameters and sum gradients where kernels read peers.

A slot pulls its full parameters straight from the owners' shards by one launch. An owner sums its rows straight from
where autograd left the gradients, by one launch too. Without such kernels ``buffers`` packs, copies and unpacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dataparallel.comm.kernels import ADDRESSES, DeviceTable, sum_kernel
from dataparallel.comm.tables import Part, all_gather, reduce_scatter
from dataparallel.sharded.units.buffers import Layout, added_in

if TYPE_CHECKING:
    from dataparallel.sharded.units.gradients import Gradients
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
    """The tables of one unit, on the devices that launch them. Those of gathers are copied there, on current streams.

    Each owner needs a table for the sums of each dtype, and each slot one for each dtype that it gathers.

    Attributes:
        summed: for each dtype of parameters that need gradients, the dtype of gradients that kernels add where they
            lie; ``None`` if they add none.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._gathers: dict[tuple[int, int, int], DeviceTable] = {}
        for slot in range(len(unit.slots)):
            for at, owned in enumerate(unit.owned):
                self.gather(slot, at, owned.layout)
        self._sums: dict[tuple[int, int, torch.dtype], list[_Sum]] = {}
        self.summed = [self._dtype_summed(dtype) for _, _, dtype in unit.gradients.groups]

    def _dtype_summed(self, dtype: torch.dtype) -> torch.dtype | None:
        """Returns the dtype in which gradients come if the sum only widens it, else the one in which slots deliver."""
        delivered, come = self._unit.dtype_of_sums(dtype), self._unit.dtype_on_slots(dtype)
        are_widened = torch.promote_types(come, delivered) == delivered
        may_be = [each for each in (come, delivered) if each == delivered or are_widened]
        return next((each for each in may_be if sum_kernel(each, added_in(delivered, dtype)) is not None), None)

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

    def _sums_of(self, at: int, owner: int, summed: torch.dtype) -> list[_Sum]:
        """Returns the tables for an owner's sums of gradients of a dtype, made on the current stream of its device."""
        key = at, owner, summed
        if key not in self._sums:
            _, layout, dtype = self._unit.gradients.groups[at]
            slots, parts = len(self._unit.slots), parts_of(layout)
            at_once = (ADDRESSES - 2) // slots  # parameters of one launch
            target = added_in(self._unit.dtype_of_sums(dtype), dtype)
            self._sums[key] = []
            for first in range(0, len(parts), at_once):
                some = parts[first : first + at_once]
                table = DeviceTable(reduce_scatter(some, owner, slots), self._unit.slots[owner], summed, target)
                self._sums[key].append(_Sum(first, first + len(some), some, table))
        return self._sums[key]

    def reduce_scatter(self, at: int, delivered: Sequence[Gradients], totals: Sequence[Tensor]) -> None:
        """Adds each owner's rows of what the slots have delivered into its total, on the current streams.

        ``delivered``: of each slot. Where no slot has a gradient, totals stay as they are.
        """
        layout = self._unit.gradients.groups[at][1]
        dtypes = {each.dtype if isinstance(each, Tensor) else self.summed[at] for each in delivered if len(each)}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"some slots hold gradients of the unit {self._unit.name!r} since before this backward, and others do "
                "not know: call set_requires_gradient_sync() between passes of backward, not inside of one"
            )
        dtype = next(iter(dtypes), None)
        if dtype is None:
            return
        of_owners = [self._sums_of(at, owner, dtype) for owner in range(len(totals))]
        has_matrices = any(isinstance(each, Tensor) for each in delivered)
        for of_parameters in zip(*of_owners, strict=True):  # the same ones, for each owner
            first, end, parts, _ = of_parameters[0]
            terms: list[Tensor | None] = []
            for each in delivered:
                some = [each] * len(parts) if isinstance(each, Tensor) else each[first:end]
                terms += some or [None] * len(parts)  # a slot may have delivered nothing
            for owner, (found, total) in enumerate(zip(of_parameters, totals, strict=True)):
                if not has_matrices:
                    found.table.launch([*terms, total])
                    continue
                # In a matrix the owner's rows of all parameters follow each other.
                rows = [owner * layout.numel + part.in_shard - sum(part.counts[:owner]) for part in parts]
                shifts = [row if isinstance(each, Tensor) else 0 for each in delivered for row in rows]
                found.table.launch([*terms, total], [*shifts, 0])
