"""The parts of a tensor: from the whole to parts, from parts to the whole, and from parts to other parts.

Parts that lie on other devices travel through ``comm``. Every copy is launched on the current streams of its devices;
what arrives on the CPU is complete when a function returns, unless the caller said ``non_blocking``. No graph is
recorded. This file knows parts and placements, not the tensor's class. ``sharded`` calls it, nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from dataparallel import comm
from dataparallel.devices import CPU
from dataparallel.sharded.placements import Placement, part_shapes

__all__ = ["copy_parts", "empty_parts", "join", "move", "split_into"]


def empty_parts(
    shape: Sequence[int], placement: Placement, devices: Sequence[torch.device], dtype: torch.dtype
) -> list[Tensor]:
    """Contiguous parts without values, one on each of the devices."""
    shapes = part_shapes(shape, placement, len(devices))
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
def split_into(parts: Sequence[Tensor], placement: Placement, tensor: Tensor, non_blocking: bool = False) -> None:
    """Copies each part of the whole ``tensor`` into one of ``parts``."""
    for part, piece in zip(parts, _views(tensor, placement, len(parts)), strict=True):
        if part.numel():
            move(part, piece, non_blocking)


@torch.no_grad()
def join(parts: Sequence[Tensor], placement: Placement, shape: Sequence[int], device: torch.device) -> Tensor:
    """The whole on ``device``, in memory of its own."""
    whole = torch.empty(torch.Size(shape), dtype=parts[0].dtype, device=device)
    if whole.is_meta:
        return whole
    if isinstance(placement, Replicate) or not shape:
        near = [part for part in parts if part.device == device and part.shape == whole.shape]
        move(whole, near[0] if near else parts[0])
    else:
        comm.gather(parts, placement.dim, out=whole)
    return whole


@torch.no_grad()
def copy_parts(
    targets: Sequence[Tensor],
    to: Placement,
    sources: Sequence[Tensor],
    of: Placement,
    shape: Sequence[int],
    non_blocking: bool = False,
) -> None:
    """Copies parts of one tensor of this shape into parts that are placed in another way.

    Each target takes from each source what both of them have; of replicated sources, from one on its own device if
    there is one.
    """
    if to == of and len(targets) == len(sources):
        for target, source in zip(targets, sources, strict=True):
            if target.numel():
                move(target, source, non_blocking)
        return
    starts = _starts(shape, to, len(targets))
    source_starts = _starts(shape, of, len(sources))
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


def _starts(shape: Sequence[int], placement: Placement, parts: int) -> list[list[int]]:
    """Where in the whole each part begins."""
    starts = [[0] * len(shape) for _ in range(parts)]
    if shape and not isinstance(placement, Replicate):
        rows = 0
        for start, part in zip(starts, part_shapes(shape, placement, parts), strict=True):
            start[placement.dim] = rows
            rows += part[placement.dim]
    return starts


def _views(tensor: Tensor, placement: Placement, parts: int) -> Sequence[Tensor]:
    if isinstance(placement, Replicate):
        return [tensor] * parts
    if tensor.dim() == 0:
        return [tensor, *[tensor.new_empty(0)] * (parts - 1)]
    sizes = [part[placement.dim] for part in part_shapes(tensor.shape, placement, parts)]
    return torch.split(tensor, sizes, placement.dim)
