"""The parts of a tensor: from the whole to parts and back, to other parts, and what other owners have.

They travel through ``comm`` on the current streams of their devices. What arrives on the CPU is complete at the return,
unless the caller said ``non_blocking``. With ``over``, the machines over which a tensor is sharded, the parts are those
of this one, and what needs parts of others is collective: all call it, in one order, with the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.devices import CPU
from dataparallel.sharded.placements import (
    Division,
    Replicate,
    Rows,
    on_this_machine,
    part_shapes,
    parts_on_all,
    rows_of,
)

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines

AT_ONCE = 4 << 20
"""Bytes of a tensor that a device holds beside its own part while the tensor is joined, if its parts are smaller."""


def empty_parts(
    shape: Sequence[int],
    placement: Division,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    over: Machines | None = None,
) -> list[Tensor]:
    """Contiguous parts without values, one on each of the devices."""
    shapes = local_shapes(shape, placement, len(devices), over)
    return [torch.empty(part, dtype=dtype, device=device) for part, device in zip(shapes, devices, strict=True)]


@torch.no_grad()
def move(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """Copies ``source`` into ``target``, of the same shape, on any device."""
    ends = (source.device.type, target.device.type)
    # Nothing travels to or from meta: torch copies nothing there, and raises for copies from there.
    if source.device == target.device or CPU.type in ends or "meta" in ends:
        target.copy_(source, non_blocking)
    else:
        comm.broadcast(source, out=[target])


@torch.no_grad()
def split_into(
    parts: Sequence[Tensor],
    placement: Division,
    tensor: Tensor,
    non_blocking: bool = False,
    over: Machines | None = None,
) -> None:
    """Copies each part of the whole ``tensor`` into one of ``parts``."""
    for part, piece in zip(parts, _views(tensor, placement, len(parts), over), strict=True):
        if part.numel():
            move(part, piece, non_blocking)


@torch.no_grad()
def join(
    parts: Sequence[Tensor],
    placement: Division,
    shape: Sequence[int],
    device: torch.device,
    over: Machines | None = None,
) -> Tensor:
    """The whole on ``device``, in memory of its own."""
    whole = torch.empty(torch.Size(shape), dtype=parts[0].dtype, device=device)
    if whole.is_meta:
        return whole
    if isinstance(placement, Replicate):
        near = [part for part in parts if part.device == device]
        move(whole, near[0] if near else parts[0])
    elif not shape:
        move(whole, the_value(parts, over))
    elif over is None:
        comm.gather(parts, placement.dim, out=whole)
    else:
        start = 0
        for rows in _rows_of_all(parts, placement, shape, over):
            move(whole.narrow(placement.dim, start, rows.shape[placement.dim]), rows)
            start += rows.shape[placement.dim]
    return whole


def the_value(parts: Sequence[Tensor], over: Machines | None) -> Tensor:
    """The one element of a 0-dim tensor that is divided. The first owner has it, on the first machine."""
    if over is None:
        return parts[0]
    return from_first(parts[0] if over.rank == 0 else parts[0].new_zeros(()), over)


@torch.no_grad()
def copy_parts(
    targets: Sequence[Tensor],
    to: Division,
    sources: Sequence[Tensor],
    of: Division,
    shape: Sequence[int],
    non_blocking: bool = False,
    *,
    to_over: Machines | None = None,
    of_over: Machines | None = None,
) -> None:
    """Copies parts of one tensor of this shape into parts that are placed in another way.

    Each target takes from each source what both of them have; of replicated sources, from one on its own device if
    there is one. Sources over machines are joined first, unless they are divided as the targets are.
    """
    if to == of and len(targets) == len(sources) and to_over == of_over:
        for target, source in zip(targets, sources, strict=True):
            if target.numel():
                move(target, source, non_blocking)
        return
    if of_over is not None and not isinstance(of, Replicate):
        split_into(targets, to, join(sources, of, shape, targets[0].device, of_over), non_blocking, to_over)
        return
    starts = starts_of_parts(shape, to, len(targets), to_over)
    source_starts = starts_of_parts(shape, of, len(sources))
    for target, start in zip(targets, starts, strict=True):
        if not target.numel():
            continue
        if isinstance(of, Replicate):
            near = [i for i, source in enumerate(sources) if source.device == target.device]
            chosen = near[:1] or [0]
        else:
            chosen = [i for i, source in enumerate(sources) if source.numel()]
        for i in chosen:
            _copy_common(target, start, sources[i], source_starts[i], non_blocking)


def _copy_common(
    target: Tensor, target_start: Sequence[int], source: Tensor, source_start: Sequence[int], non_blocking: bool
) -> None:
    """Copies what two parts of one whole have in common. Each begins at its own place of the whole."""
    for dim in range(target.dim()):
        start = max(target_start[dim], source_start[dim])
        stop = min(target_start[dim] + target.shape[dim], source_start[dim] + source.shape[dim])
        if stop <= start:
            return
        target = target.narrow(dim, start - target_start[dim], stop - start)
        source = source.narrow(dim, start - source_start[dim], stop - start)
    move(target, source, non_blocking)


def starts_of_parts(
    shape: Sequence[int], placement: Division, parts: int, over: Machines | None = None
) -> list[list[int]]:
    """Where in the whole each part begins."""
    starts = [[0] * len(shape) for _ in range(parts)]
    if shape and not isinstance(placement, Replicate):
        rows = rows_of(placement, shape[placement.dim], parts_on_all(parts, over))
        for start, first in zip(starts, on_this_machine([0, *accumulate(rows)][:-1], over), strict=True):
            start[placement.dim] = first
    return starts


def _views(tensor: Tensor, placement: Division, parts: int, over: Machines | None) -> Sequence[Tensor]:
    if isinstance(placement, Replicate):
        return [tensor] * parts
    count = parts_on_all(parts, over)
    if tensor.dim() == 0:
        return on_this_machine([tensor, *[tensor.new_empty(0)] * (count - 1)], over)
    return on_this_machine(tensor.split(rows_of(placement, tensor.shape[placement.dim], count), placement.dim), over)


# ---- what other owners have ------------------------------------------------------------------------------------------


def local_shapes(shape: Sequence[int], placement: Division, owners: int, over: Machines | None) -> list[torch.Size]:
    """The shape of the part of each owner on this machine. ``owners``: how many there are on it."""
    return [*on_this_machine(part_shapes(shape, placement, parts_on_all(owners, over)), over)]


def from_all(tensor: Tensor, over: Machines) -> Tensor:
    """The tensors of all machines, ``[machines, *shape]``, on the device of ``tensor``.

    They travel as bytes, so any dtype does, and all machines get the same bits.
    """
    if tensor.is_meta or not tensor.numel():
        return tensor.new_empty((over.size, *tensor.shape))
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    gathered = over.all_gather(values.view(-1).view(torch.uint8))
    return gathered.reshape(-1).view(tensor.dtype).view(over.size, *tensor.shape)


def from_first(tensor: Tensor, over: Machines) -> Tensor:
    """The tensor of machine 0. What the others pass has its shape and dtype."""
    return from_all(tensor, over)[0]


def of_all_owners(of_owners: Tensor, over: Machines) -> Tensor:
    """From what each owner here has found, ``[owners, ...]``, to what all have, in the order of their parts."""
    return from_all(of_owners, over).transpose(0, 1).flatten(0, 1)


def _rows_of_all(
    parts: Sequence[Tensor], placement: Division, shape: Sequence[int], over: Machines
) -> Iterator[Tensor]:
    """The whole tensor, cut along the placement's dimension into pieces that follow each other.

    A piece has the parts of one owner on all machines and is on that owner's device, or of several owners if they are
    small, on the device of the first of them.
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
