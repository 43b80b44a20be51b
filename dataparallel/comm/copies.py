"""The plain-copy transport: tensors travel by ``Tensor.to`` and ``Tensor.copy_``, sums run in slot order.

It works on every backend that torch knows, several slots on one device and CPU slots included, and is what
every other transport is compared with. It checks nothing: only ``comm`` calls it, with arguments that ``comm``
has checked and with gradient recording off. Copies from and to the host block, so that a pinned batch is the
caller's again and a result on the CPU is complete when a call returns; copies between devices are ordered by
torch against the current streams of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel.buckets import PLAIN_TYPES, Bucket, dense_stride, flatten, plan_buckets, travels_flat, unflatten


def send(tensor: Tensor, device: torch.device, *, own: bool = False) -> Tensor:
    """``tensor`` on ``device``: itself where it is there already, unless the caller needs its ``own`` storage."""
    if tensor.device == device and not own:
        return tensor
    return same_kind(tensor.detach().to(device, copy=True), tensor)


def same_kind(new: Tensor, original: Tensor) -> Tensor:
    """``new`` with the class and the Python attributes of ``original``, whose data it holds."""
    if type(new) is Tensor and type(original) not in PLAIN_TYPES:
        new = new.as_subclass(type(original))
    if original.__dict__:
        new.__dict__.update(original.__dict__)
    return new


def broadcast(tensor: Tensor, devices: Sequence[torch.device], *, own: bool) -> list[Tensor]:
    """One tensor for each slot; slots on one device share one copy unless they need their ``own``."""
    sent: dict[torch.device, Tensor] = {}
    results = []
    for slot, device in enumerate(devices):
        if own and slot > 0:
            results.append(send(tensor, device, own=True))
        else:
            if device not in sent:
                sent[device] = send(tensor, device)
            results.append(sent[device])
    return results


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], buffer_size: int, *, own: bool
) -> list[list[Tensor]]:
    """The tensors for each slot; those that have to move, move in flat buckets."""
    results = [list(tensors) for _ in devices]
    arrived: dict[torch.device, list[Tensor]] = {}
    # Where all slots are on one device, what is there already stays, unless slots need their own.
    stays = devices[0] if len({*devices}) == 1 and not (own and len(devices) > 1) else None
    moving = [i for i, tensor in enumerate(tensors) if tensor.device != stays]
    buckets, singles = plan_buckets(tensors, buffer_size, candidates=moving)
    for index in singles:
        for result, copy in zip(results, broadcast(tensors[index], devices, own=own), strict=True):
            result[index] = copy
    for bucket in buckets:
        flat: Tensor | None = None
        arrived.clear()
        source = tensors[bucket.indices[0]].device
        for slot, device in enumerate(devices):
            needs_own = own and slot > 0
            if device == source and not needs_own:
                continue
            parts = None if needs_own else arrived.get(device)
            if parts is None:
                if flat is None:
                    flat = flatten(bucket, tensors)
                parts = arrived[device] = unflatten(bucket, flat.to(device, copy=True))
            for index, part in zip(bucket.indices, parts, strict=True):
                results[slot][index] = part
    return results


def reduce_add(inputs: Sequence[Tensor], destination: torch.device) -> Tensor:
    """The sum, in slot order, on ``destination``; one input alone is handed through."""
    total = send(inputs[0], destination)
    for tensor in inputs[1:]:
        term = send(tensor, destination)
        if total.is_sparse and not term.is_sparse:
            # Only dense plus sparse is an operator; the sum of two is the same to the bit.
            total, term = term, total
        # Repeated indices are summed first: where they meet dense memory, CUDA would add them in any order.
        total = total + (term.coalesce() if term.is_sparse and not total.is_sparse else term)
    return total


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]], destination: torch.device, buffer_size: int
) -> list[Tensor]:
    """For every position the sum over slots, in slot order; dense tensors travel in flat buckets."""
    first = inputs[0]
    if len(inputs) == 1:
        return [send(tensor, destination) for tensor in first]
    results = list(first)
    flat_ones = list(range(len(first)))
    for tensors in inputs:
        device = tensors[0].device
        flat_ones = [i for i in flat_ones if travels_flat(tensors[i]) and tensors[i].device == device]
    buckets, _ = plan_buckets(first, buffer_size, candidates=flat_ones, keep_repeats=False)
    for index in set(range(len(first))).difference(flat_ones):
        results[index] = reduce_add([tensors[index] for tensors in inputs], destination)
    for bucket in buckets:
        for index, total in zip(bucket.indices, _sum_bucket(bucket, inputs, destination), strict=True):
            results[index] = total
    return results


def _sum_bucket(bucket: Bucket, inputs: Sequence[Sequence[Tensor]], destination: torch.device) -> list[Tensor]:
    if all(tensors[bucket.indices[0]].device == destination for tensors in inputs):
        # Nothing has to travel, so nothing has to be flattened.
        terms = [[tensors[i] for i in bucket.indices] for tensors in inputs]
        totals = torch._foreach_add(terms[0], terms[1])
        for term in terms[2:]:
            torch._foreach_add_(totals, term)
        return list(totals)
    flat = flatten(bucket, inputs[0]).to(destination)
    for tensors in inputs[1:]:
        flat.add_(flatten(bucket, tensors).to(destination))
    return unflatten(bucket, flat)


def scatter(tensor: Tensor, devices: Sequence[torch.device], sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Consecutive chunks of the given sizes along ``dim``; chunks that need not move are views."""
    if len(sizes) == 1:
        return [send(tensor, devices[0])]
    if tensor.layout is torch.sparse_coo:
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        chunks = [tensor.detach().narrow_copy(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
    else:
        chunks = list(torch.split(tensor.detach(), list(sizes), dim))
    return [same_kind(send(chunk, device), tensor) for chunk, device in zip(chunks, devices, strict=True)]


def gather(tensors: Sequence[Tensor], dim: int, destination: torch.device) -> Tensor:
    """The tensors one after the other along ``dim``; one alone is handed through if it is there already."""
    if len(tensors) == 1:
        return send(tensors[0], destination)
    if all(tensor.device == destination for tensor in tensors) or not all(map(travels_flat, tensors)):
        return torch.cat([send(tensor, destination) for tensor in tensors], dim)
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    stride = dense_stride(shape, torch.empty_like(first, device="meta").stride())
    out = torch.empty_strided(shape, stride, dtype=first.dtype, device=destination)
    return gather_into(out, tensors, dim)


def gather_into(out: Tensor, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Copies the tensors into consecutive parts of ``out`` along ``dim``."""
    for part, tensor in zip(torch.split(out, [t.shape[dim] for t in tensors], dim), tensors, strict=True):
        part.copy_(tensor)
    return out
