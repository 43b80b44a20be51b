"""What other owners have, also those on other machines: their parts of a tensor, their results of a reduction.

Every function here that sends something to other machines takes an `Over` and is collective: all machines call it, in
one order, with tensors of the same shapes and dtypes. Values travel as bytes, so any dtype does, and all machines get
the same bits. ``sharded`` calls it, nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from dataparallel import comm
from dataparallel.sharded.owners import Over
from dataparallel.sharded.placements import Division, Rows, part_shapes

__all__ = ["from_all", "from_first", "joined", "local_shapes", "of_all_owners", "rows_of_all"]

AT_ONCE = 4 << 20
"""Bytes of a tensor that a device holds beside its own part while the tensor is joined, if its parts are smaller."""


def local_shapes(shape: Sequence[int], placement: Division, owners: int, over: Over | None) -> list[torch.Size]:
    """The shape of the part of each owner on this machine. ``owners``: how many there are on it."""
    if over is None:
        return part_shapes(shape, placement, owners)
    return part_shapes(shape, placement, owners * over.size)[over.rank :: over.size]


def from_all(tensor: Tensor, over: Over) -> Tensor:
    """The tensors of all machines, ``[machines, *shape]``, on the device of ``tensor``."""
    if tensor.is_meta or not tensor.numel():
        return tensor.new_empty((over.size, *tensor.shape))
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    gathered = over.all_gather(values.view(-1).view(torch.uint8))
    return gathered.reshape(-1).view(tensor.dtype).view(over.size, *tensor.shape)


def from_first(tensor: Tensor, over: Over) -> Tensor:
    """The tensor of machine 0. What the others pass has its shape and dtype."""
    return from_all(tensor, over)[0]


def of_all_owners(of_owners: Tensor, over: Over) -> Tensor:
    """From what each owner here has found, ``[owners, ...]``, to what all have, in the order of their parts."""
    return from_all(of_owners, over).transpose(0, 1).flatten(0, 1)


def rows_of_all(parts: Sequence[Tensor], placement: Division, shape: Sequence[int], over: Over) -> Iterator[Tensor]:
    """The whole tensor, cut along the placement's dimension into pieces that follow each other.

    A piece has the parts of one owner on all machines and is on that owner's device, or of several owners if they are
    small, on the device of the first of them.

    Args:
        parts: of this machine, in the order of its owners.
        placement: by which it is divided, in one dimension that it has.
    """
    assert not isinstance(placement, Replicate)
    dim = placement.dim
    shapes = part_shapes(shape, placement, len(parts) * over.size)
    largest = max(shapes, key=lambda part: part[dim])
    each = prod(largest) * parts[0].element_size() * over.size
    step = max(1, AT_ONCE // max(each, 1))
    for first in range(0, len(parts), step):
        some = parts[first : first + step]
        of_some = [part[dim] for part in shapes[first * over.size : (first + len(some)) * over.size]]
        rows = sum(of_some)
        if not rows:
            continue
        gathered = from_all(joined([_padded(part, largest) for part in some]), over)  # [machines, owners, *largest]
        in_order = gathered.movedim((1, 0), (dim, dim + 1)).flatten(dim, dim + 2)
        if isinstance(placement, Rows):
            pieces = in_order.split(largest[dim], dim)
            yield torch.cat([piece.narrow(dim, 0, of) for piece, of in zip(pieces, of_some, strict=True)], dim)
        else:  # only the last ones are not full
            yield in_order.narrow(dim, 0, rows)


def joined(of_owners: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape from all owners on this machine, stacked on the first one's device."""
    first = of_owners[0]
    if len(of_owners) == 1:
        return first.unsqueeze(0)
    if all(one.device == first.device for one in of_owners):
        return torch.stack([*of_owners])
    return comm.gather([one.unsqueeze(0) for one in of_owners], 0, first.device)


def _padded(part: Tensor, shape: torch.Size) -> Tensor:
    """The part, filled up to this shape: what follows it is cut off later."""
    if part.shape == shape:
        return part
    filled = part.new_zeros(shape)
    filled[tuple(slice(size) for size in part.shape)].copy_(part)
    return filled
