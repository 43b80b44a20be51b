"""`split_into` copies a full tensor to shards, `gather_full` shards to a full tensor.

They travel through ``comm`` on the current streams of their devices. A copy to the CPU is complete at the return,
unless ``non_blocking`` is true. With ``over``, the machines over which a tensor is sharded, shards are those of this
machine. A function that needs others' is collective: all machines call it, in one order, with the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.devices import CPU
from dataparallel.sharded.placements import (
    Placement,
    Replicate,
    on_this_machine,
    rows_of_shards,
    shard_shapes,
    shards_on_all_machines,
)

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Machines


def empty_shards(
    shape: Sequence[int],
    placement: Placement,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    over: Machines | None = None,
) -> list[Tensor]:
    shapes = local_shard_shapes(shape, placement, len(devices), over)
    return [torch.empty(of_shard, dtype=dtype, device=device) for of_shard, device in zip(shapes, devices, strict=True)]


@torch.no_grad()
def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """Copies ``source`` into ``target``, which has the same shape and may be on another device."""
    types = (source.device.type, target.device.type)
    # A copy to meta does nothing in torch, and a copy from meta raises.
    if source.device == target.device or CPU.type in types or "meta" in types:
        target.copy_(source, non_blocking)
    else:
        comm.broadcast(source, out=[target])


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on this device, where it may be already."""
    if tensor.device == device:
        return tensor
    copied = torch.empty_like(tensor, device=device)
    copy_into(copied, tensor)
    return copied


@torch.no_grad()
def split_into(
    shards: Sequence[Tensor],
    placement: Placement,
    tensor: Tensor,
    non_blocking: bool = False,
    over: Machines | None = None,
) -> None:
    """Copies the values of each shard from the full ``tensor``."""
    for shard, view in zip(shards, views_of_shards(tensor, placement, len(shards), over), strict=True):
        if shard.numel():
            copy_into(shard, view, non_blocking)


@torch.no_grad()
def gather_full(
    shards: Sequence[Tensor],
    placement: Placement,
    shape: Sequence[int],
    device: torch.device,
    over: Machines | None = None,
) -> Tensor:
    """Copies the shards of a tensor of this shape into a full tensor on ``device``."""
    full = torch.empty(torch.Size(shape), dtype=shards[0].dtype, device=device)
    if full.is_meta:
        return full
    if isinstance(placement, Replicate):
        on_device = [shard for shard in shards if shard.device == device]
        copy_into(full, on_device[0] if on_device else shards[0])
    elif not shape:
        copy_into(full, scalar_of(shards, over))
    elif over is None:
        comm.gather(shards, placement.dim, out=full)
    else:
        start = 0
        for rows in _rows_of_all_machines(shards, placement, shape, over):
            copy_into(full.narrow(placement.dim, start, rows.shape[placement.dim]), rows)
            start += rows.shape[placement.dim]
    return full


def scalar_of(shards: Sequence[Tensor], over: Machines | None) -> Tensor:
    """The element of a 0-dim tensor that is divided. The first owner of the first machine has it."""
    if over is None:
        return shards[0]
    return all_gather_stacked(shards[0] if over.rank == 0 else shards[0].new_zeros(()), over)[0]


def views_of_shards(tensor: Tensor, placement: Placement, owners: int, over: Machines | None) -> Sequence[Tensor]:
    """For each owner on this machine a view of the elements of a full tensor that belong to its shard."""
    if isinstance(placement, Replicate):
        return [tensor] * owners
    count = shards_on_all_machines(owners, over)
    if tensor.dim() == 0:
        return on_this_machine([tensor, *[tensor.new_empty(0)] * (count - 1)], over)
    return on_this_machine(tensor.split(rows_of_shards(tensor.shape[placement.dim], count), placement.dim), over)


# ---- shards of other machines ----------------------------------------------------------------------------------------


def local_shard_shapes(
    shape: Sequence[int], placement: Placement, owners: int, over: Machines | None
) -> list[torch.Size]:
    """The shape of the shard of each owner on this machine. ``owners``: how many owners this machine has."""
    return [*on_this_machine(shard_shapes(shape, placement, shards_on_all_machines(owners, over)), over)]


def all_gather_stacked(tensor: Tensor, over: Machines) -> Tensor:
    """All-gathers one tensor of each machine: ``[machines, *shape]``, on the device of ``tensor``.

    The tensors travel as bytes, so every dtype can be sent, and all machines get the same bits.
    """
    if tensor.is_meta or not tensor.numel():
        return tensor.new_empty((over.size, *tensor.shape))
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    gathered = over.all_gather(values.view(-1).view(torch.uint8))
    return gathered.reshape(-1).view(tensor.dtype).view(over.size, *tensor.shape)


def all_gather_owners(of_owners: Tensor, over: Machines) -> Tensor:
    """All-gathers a row of each owner, ``[owners, ...]`` on each machine. The rows come in the order of the shards."""
    return all_gather_stacked(of_owners, over).transpose(0, 1).flatten(0, 1)


def _rows_of_all_machines(
    shards: Sequence[Tensor], placement: Placement, shape: Sequence[int], over: Machines
) -> Iterator[Tensor]:
    """Yields consecutive pieces of the full tensor, cut along the placement's dimension.

    A piece holds the shards that one owner has on all machines, and is on its device.
    """
    assert not isinstance(placement, Replicate)
    dim = placement.dim
    shapes = shard_shapes(shape, placement, len(shards) * over.size)
    largest = max(shapes, key=lambda of_shard: of_shard[dim])
    for owner, shard in enumerate(shards):
        sizes = [of_shard[dim] for of_shard in shapes[owner * over.size : (owner + 1) * over.size]]
        if not sum(sizes):
            continue
        gathered = all_gather_stacked(_padded(shard, largest), over)
        yield torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(gathered, sizes, strict=True)], dim)


def stack_on_first(of_owners: Sequence[Tensor]) -> Tensor:
    """Stacks tensors of one shape, one from each owner on this machine, on the device of the first one."""
    first = of_owners[0].device
    if all(one.device == first for one in of_owners):
        return torch.stack([*of_owners])
    return comm.gather([one.unsqueeze(0) for one in of_owners], 0, first)


def _padded(shard: Tensor, shape: torch.Size) -> Tensor:
    if shard.shape == shape:
        return shard
    padded = shard.new_zeros(shape)
    padded[tuple(slice(size) for size in shard.shape)].copy_(shard)
    return padded
