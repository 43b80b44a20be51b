"""Plans: pure functions that say what a collective copies and adds, as rows of a target and of terms.

`copies` plans for tensors of any strides. `all_gather` and `reduce_scatter` plan for flat memory, of which they see
only sizes: a `Table` is made once and serves any memory. ``Transport.execute`` does by copies what rows say,
``comm.kernels`` does what a table says by one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class TensorRow(NamedTuple):
    """``target`` gets the sum of ``terms``, added in its dtype and in their order, or a copy of the only one.

    All have one shape. The target may be the memory of the first term.
    """

    target: Tensor
    terms: Sequence[Tensor]


def copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> list[TensorRow]:
    """Copies source i into target i."""
    return [TensorRow(target, [source]) for target, source in zip(targets, sources, strict=True)]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial sums: ``float32`` for 16-bit floats, so that a sum is rounded once; else ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# ---- flat memory -----------------------------------------------------------------------------------------------------


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
