"""How a tensor is divided among devices: which part of it each device owns.

Placements are ``torch.distributed.tensor``'s own classes, so that they compare equal to those that users have. Nothing
else of that package is used: there are no processes and no meshes here. `Shard(dim)` cuts as ``torch.chunk`` does: the
first devices own ``ceil(rows / devices)`` rows each, the last ones fewer, or none. A 0-dim tensor counts as one row,
which the first device owns. `Replicate()` puts the whole tensor on every device. `Rows` is what views of a divided
tensor have: operators make it, and users cannot divide a tensor so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor import Replicate, Shard

__all__ = [
    "Division",
    "Placement",
    "Replicate",
    "Rows",
    "Shard",
    "check_placement",
    "moved",
    "part_shapes",
    "rows_of",
    "rows_of_parts",
]


@dataclass(frozen=True)
class Rows:
    """Each device owns a given number of rows along dimension ``dim``, in the order of the devices.

    Attributes:
        dim: the dimension, not negative.
        rows: for each part, over all machines.
    """

    dim: int
    rows: tuple[int, ...]


Placement: TypeAlias = "Shard | Replicate"
"""What users give."""

Division: TypeAlias = "Placement | Rows"
"""What tensors have."""


def check_placement(placement: object, shape: Sequence[int]) -> Placement:
    """The placement, with a dimension that is not negative.

    Raises:
        TypeError: it is neither a `Shard` nor a `Replicate`.
        ValueError: a tensor of this shape has no such dimension.
    """
    if isinstance(placement, Replicate):
        return placement
    # Exactly `Shard`: its subclasses divide in other ways.
    if type(placement) is not Shard:
        raise TypeError(f"a placement is Shard(dim) or Replicate() of torch.distributed.tensor; got {placement!r}")
    dim, dims = placement.dim, max(len(shape), 1)
    if not -dims <= dim < dims:
        raise ValueError(f"cannot place a tensor of shape {tuple(shape)} by {placement!r}: it has no such dimension")
    return Shard(dim % dims)


def rows_of_parts(rows: int, parts: int) -> list[int]:
    """How many of ``rows`` each of ``parts`` devices owns."""
    each = -(-rows // parts)
    return [max(0, min(each, rows - i * each)) for i in range(parts)]


def rows_of(placement: Shard | Rows, rows: int, parts: int) -> list[int]:
    """How many of ``rows`` along the placement's dimension each of ``parts`` devices owns."""
    return [*placement.rows] if isinstance(placement, Rows) else rows_of_parts(rows, parts)


def moved(placement: Shard | Rows, dim: int) -> Shard | Rows:
    """The same division along another dimension."""
    return Rows(dim, placement.rows) if isinstance(placement, Rows) else Shard(dim)


def part_shapes(shape: Sequence[int], placement: Division, parts: int) -> list[torch.Size]:
    """The shape of each device's part of a tensor of this shape."""
    if isinstance(placement, Replicate):
        return [torch.Size(shape)] * parts
    if not shape:
        return [torch.Size(()), *[torch.Size((0,))] * (parts - 1)]
    dim = placement.dim
    return [torch.Size([*shape[:dim], rows, *shape[dim + 1 :]]) for rows in rows_of(placement, shape[dim], parts)]
