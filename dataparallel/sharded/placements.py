"""How a tensor is divided among devices: which part of it each device owns.

Placements are ``torch.distributed.tensor``'s own classes, so that they compare equal to those that users have. Nothing
else of that package is used: there are no processes and no meshes here. `Shard(dim)` cuts as ``torch.chunk`` does: the
first devices own ``ceil(rows / devices)`` rows each, the last ones fewer, or none. A 0-dim tensor counts as one row,
which the first device owns. `Replicate()` puts the whole tensor on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.tensor import Replicate, Shard

__all__ = ["Placement", "Replicate", "Shard", "check_placement", "part_shapes", "rows_of_parts"]

Placement: TypeAlias = "Shard | Replicate"


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


def part_shapes(shape: Sequence[int], placement: Placement, parts: int) -> list[torch.Size]:
    """The shape of each device's part of a tensor of this shape."""
    if isinstance(placement, Replicate):
        return [torch.Size(shape)] * parts
    if not shape:
        return [torch.Size(()), *[torch.Size((0,))] * (parts - 1)]
    dim = placement.dim
    return [torch.Size([*shape[:dim], rows, *shape[dim + 1 :]]) for rows in rows_of_parts(shape[dim], parts)]
