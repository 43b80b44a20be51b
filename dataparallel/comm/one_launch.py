"""The cupy transport: many tensors copied, or summed over the slots, in one launch, without flattening.

``cupy_kernels`` launches; this room makes the memory for results, and has plain copies carry what the kernels leave. It
has not been run on a GPU, and is used only where a user asks for it (``transport="cupy"``). Only ``comm`` calls it,
with arguments that ``comm`` has checked and with gradient recording off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel.buckets import Bucket, plan_buckets, unflatten
from dataparallel.comm import copies, cupy_kernels

__all__ = ["broadcast_coalesced", "reduce_add_coalesced"]


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[torch.device], *, own: bool) -> list[list[Tensor]]:
    """As `copies.broadcast_coalesced`, by one launch for each dtype."""
    results = [list(tensors) for _ in devices]
    buckets, left = plan_buckets(tensors, sys.maxsize, keep_repeats=False)
    for bucket in buckets:
        left += _copied(bucket, tensors, devices, own, results)
    rest = copies.broadcast_coalesced([tensors[i] for i in left], devices, sys.maxsize, own=own)
    for result, copied in zip(results, rest, strict=True):
        for index, copy in zip(left, copied, strict=True):
            result[index] = copy
    return results


def _copied(
    bucket: Bucket,
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    own: bool,
    results: Sequence[list[Tensor]],
) -> list[int]:
    """Puts copies of the bucket's tensors into ``results``; which ones it had to leave."""
    members = [tensors[i] for i in bucket.indices]
    source = members[0].device
    of_slots: dict[int, list[Tensor]] = {}
    on_devices: dict[torch.device, list[Tensor]] = {}
    for slot, device in enumerate(devices):
        if own and slot > 0:
            of_slots[slot] = _room(bucket, members[0].dtype, device)
        elif device != source:
            if device not in on_devices:
                on_devices[device] = _room(bucket, members[0].dtype, device)
            of_slots[slot] = on_devices[device]
    if not of_slots:
        return []
    distinct = {id(parts): parts for parts in of_slots.values()}
    left = {*cupy_kernels.copy_many(members, list(distinct.values()))}
    for slot, parts in of_slots.items():
        for position, (index, part) in enumerate(zip(bucket.indices, parts, strict=True)):
            if position not in left:
                results[slot][index] = part
    return [bucket.indices[position] for position in left]


def reduce_add_coalesced(inputs: Sequence[Sequence[Tensor]], destination: torch.device) -> list[Tensor]:
    """As `copies.reduce_add_coalesced`, by one launch for each dtype."""
    first = inputs[0]
    results = list(first)
    flat_ones = copies.travel_flat_on_every_slot(inputs) if len(inputs) > 1 else []
    left = sorted({*range(len(first))}.difference(flat_ones))
    buckets, _ = plan_buckets(first, sys.maxsize, candidates=flat_ones, keep_repeats=False)
    for bucket in buckets:
        out = _room(bucket, first[bucket.indices[0]].dtype, destination)
        skipped = {*cupy_kernels.sum_many([[tensors[i] for i in bucket.indices] for tensors in inputs], out)}
        for position, (index, total) in enumerate(zip(bucket.indices, out, strict=True)):
            if position in skipped:
                left.append(index)
            else:
                results[index] = total
    rest = copies.reduce_add_coalesced([[tensors[i] for i in left] for tensors in inputs], destination, sys.maxsize)
    for index, total in zip(left, rest, strict=True):
        results[index] = total
    return results


def _room(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Memory for the bucket's tensors, in one piece."""
    numel = sum(layout.numel for layout in bucket.layouts)
    return unflatten(bucket, torch.empty(numel, dtype=dtype, device=device))
