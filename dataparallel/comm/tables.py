"""`Table`: what one launch copies and adds, as rows of places in tensors; `by_torch` does it on any device.

A plan is a pure function that makes a table for each device: `all_gather`, `reduce_scatter`. It sees no tensor, only
their sizes, so a table is made once and serves any memory. ``comm.kernels`` executes a table by one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from torch import Tensor

from dataparallel.comm.transport import summed_in


class Place(NamedTuple):
    """Element ``first`` of tensor number ``tensor``, and the elements after it in memory."""

    tensor: int
    first: int


class TableRow(NamedTuple):
    """``numel`` elements: ``target`` gets the sum of ``terms``, added in their order, or a copy of the only one."""

    target: Place
    terms: tuple[Place, ...]
    numel: int


Table: TypeAlias = "list[TableRow]"
"""All rows have as many terms. No row writes what another one reads or writes. A target may be the memory of a term of
its own row."""


class Part(NamedTuple):
    """A tensor that is cut into rows for its owners, in their order.

    Attributes:
        in_shard: its first element in the flat shard of each owner.
        in_full: its first element in the flat buffer that has the whole tensor.
        counts: the elements of each owner.
    """

    in_shard: int
    in_full: int
    counts: tuple[int, ...]


def all_gather(parts: Sequence[Part], first: int = 0) -> Table:
    """Copies the rows of all owners into a full buffer. Begins with owner ``first``: slots begin with distinct owners.

    Tensors: the flat shard of each owner, then the full buffer.
    """
    owners = len(parts[0].counts) if parts else 0
    starts = [[*accumulate(part.counts, initial=part.in_full)] for part in parts]
    return [
        TableRow(Place(owners, start[owner]), (Place(owner, part.in_shard),), part.counts[owner])
        for owner in [(first + i) % owners for i in range(owners)]
        for part, start in zip(parts, starts, strict=True)
    ]


def reduce_scatter(parts: Sequence[Part], owner: int, slots: int) -> Table:
    """Adds an owner's rows of the gradients of all ``slots``, in slot order, into its flat shard of the sums.

    Tensors: the gradients of slot 0, one for each part, then those of slot 1, and so on; then the flat shard.
    """
    starts = [sum(part.counts[:owner]) for part in parts]
    return [
        TableRow(
            Place(slots * len(parts), part.in_shard),
            tuple(Place(slot * len(parts) + at, start) for slot in range(slots)),
            part.counts[owner],
        )
        for at, (part, start) in enumerate(zip(parts, starts, strict=True))
    ]


def by_torch(table: Table, tensors: Sequence[Tensor | None]) -> None:
    """Executes a table row by row, on the current streams. `comm.kernels.DeviceTable.launch` has the same bits.

    A term whose tensor is ``None`` is left out; a row without terms stays as it is.
    """

    def elements(place: Place, numel: int) -> Tensor | None:
        tensor = tensors[place.tensor]
        return None if tensor is None else tensor.as_strided((numel,), (1,), tensor.storage_offset() + place.first)

    for target, terms, numel in table:
        found = [term for place in terms if (term := elements(place, numel)) is not None]
        result = elements(target, numel)
        if not found or result is None or not numel:
            continue
        if len(found) == 1:
            result.copy_(found[0])
            continue
        wide = summed_in(found[0].dtype)
        total = found[0].to(result.device, wide, copy=True)
        for term in found[1:]:
            total.add_(term.to(result.device))
        result.copy_(total)
