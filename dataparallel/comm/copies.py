"""Tensors for slots and sums over slots: in flat buckets, by whatever carries these between devices.

It works on every backend that torch knows, several slots on one device and CPU slots included; by torch's own copies,
its default, it is what every other transport is compared with. Sums run in slot order. It checks nothing: only ``comm``
calls it, with arguments that ``comm`` has checked and with gradient recording off. Copies from and to the host block,
so that a pinned batch is the caller's again and a result on the CPU is complete when a call returns; copies between
devices are ordered by torch against the current streams of both.

Slots that are ``isolated`` count as devices: what goes from one to another is copied also within a device, in the
buffers, and along the routes, in which it would go from device to device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.buckets import (
    PLAIN_TYPES,
    Bucket,
    Planned,
    dense_stride,
    flatten,
    plan_buckets,
    travels_flat,
    unflatten,
)
from dataparallel.comm.routes import STAR, Transport, Travelling, summed_in


def send(tensor: Tensor, device: torch.device, *, own: bool = False, transport: Transport = STAR) -> Tensor:
    """``tensor`` on ``device``: itself where it is there already, unless the caller needs its ``own`` storage."""
    if tensor.device == device:
        return same_kind(tensor.detach().clone(), tensor) if own else tensor
    return same_kind(transport.send(tensor.detach(), device), tensor)


def same_kind(new: Tensor, original: Tensor) -> Tensor:
    """``new`` with the class and the Python attributes of ``original``, whose data it holds."""
    if type(new) is Tensor and type(original) not in PLAIN_TYPES:
        new = new.as_subclass(type(original))
    if original.__dict__:
        new.__dict__.update(original.__dict__)
    return new


def alias(tensor: Tensor, slot: int) -> Tensor:
    """Another tensor object on the same memory, of the same class, with the same Python attributes, without graph.

    For slot 0 it keeps the version counter, by which autograd notices that the source changes before backward. Those of
    other slots have their own, or what one replica changes in place would seem to have changed in all.
    """
    return same_kind(tensor.data if slot else tensor.detach(), tensor)


def broadcast(
    tensor: Tensor, devices: Sequence[torch.device], *, own: bool, transport: Transport = STAR
) -> list[Tensor]:
    """One tensor for each slot; slots on one device share one copy unless they need their ``own``."""
    if transport != STAR and travels_flat(tensor):
        return [copy for (copy,) in broadcast_coalesced([tensor], devices, sys.maxsize, own=own, transport=transport)]
    return _singly(tensor, devices, own, transport)


def _singly(tensor: Tensor, devices: Sequence[torch.device], own: bool, transport: Transport) -> list[Tensor]:
    sent: dict[torch.device, Tensor] = {}
    results = []
    for slot, device in enumerate(devices):
        if own and slot > 0:
            results.append(send(tensor, device, own=True, transport=transport))
        else:
            if device not in sent:
                sent[device] = send(tensor, device, transport=transport)
            results.append(sent[device])
    return results


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    buffer_size: int,
    *,
    own: bool,
    isolated: bool = False,
    transport: Transport = STAR,
    planned: Planned | None = None,
) -> list[list[Tensor]]:
    """The tensors for each slot; those that have to move, move in flat buckets. Isolated slots have their ``own``.

    ``planned``: what `plan_buckets` has made of all of the tensors, where that is known.
    """
    own = own or isolated
    results = [list(tensors) for _ in devices]
    # Where all slots are on one device, what is there already stays, unless slots need their own.
    stays = devices[0] if len({*devices}) == 1 and not (own and len(devices) > 1) else None
    moving = [i for i, tensor in enumerate(tensors) if tensor.device != stays]
    if planned is None or len(moving) < len(tensors):
        planned = plan_buckets(tensors, buffer_size, candidates=moving)
    buckets, singles = planned
    for index in singles:
        for result, copy in zip(results, _singly(tensors[index], devices, own, transport), strict=True):
            result[index] = copy
    for bucket in buckets:
        source = tensors[bucket.indices[0]].device
        needing = [slot for slot, device in enumerate(devices) if device != source or (own and slot > 0)]
        if not needing:
            continue
        flat = flatten(bucket, tensors)
        # A buffer goes to the first slot on each other device, to all slots where they are isolated.
        first_on = {device: devices.index(device) for device in devices if device != source}
        receiving = needing if isolated else list(first_on.values())
        buffers = {slot: torch.empty_like(flat, device=devices[slot]) for slot in receiving}
        transport.spread(flat, [*buffers.values()])
        arrived = {slot: unflatten(bucket, buffer) for slot, buffer in buffers.items()}
        for slot in needing:
            device = devices[slot]
            if slot in arrived:
                parts = arrived[slot]
            elif own and slot > 0:
                parts = unflatten(bucket, (buffers[first_on[device]] if device in first_on else flat).clone())
            else:
                parts = arrived[first_on[device]]
            for index, part in zip(bucket.indices, parts, strict=True):
                results[slot][index] = part
    return results


def broadcast_into(out: Sequence[Tensor], tensor: Tensor, transport: Transport) -> None:
    """Copies ``tensor`` into each of ``out``, whose dtypes may be others."""
    devices = [target.device for target in out]
    are_apart = len({tensor.device, *devices}) == 1 + len(devices)
    # What is passed on from device to device must be what was sent.
    if are_apart and all(target.dtype == tensor.dtype for target in out) and all(map(_is_flat, (tensor, *out))):
        transport.spread(tensor, out)
    else:
        for target in out:
            transport.copy(target, tensor)


def _is_flat(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and travels_flat(tensor) and tensor.is_contiguous()


def reduce_add(
    inputs: Sequence[Tensor], destination: torch.device, transport: Transport = STAR, *, isolated: bool = False
) -> Tensor:
    """The sum, in slot order, on ``destination``; one input alone is handed through."""
    if transport != STAR and len(inputs) > 1 and all(map(travels_flat, inputs)):
        of_slots = [[tensor] for tensor in inputs]
        (total,) = reduce_add_coalesced(of_slots, destination, sys.maxsize, transport, isolated=isolated)
        return total
    return _one_by_one(inputs, destination, transport, isolated)


def _one_by_one(inputs: Sequence[Tensor], destination: torch.device, transport: Transport, isolated: bool) -> Tensor:
    dtype = inputs[0].dtype
    total = send(inputs[0], destination, transport=transport)
    if len(inputs) == 1:
        return total
    total = total.to(summed_in(dtype))
    for tensor in inputs[1:]:
        term = send(tensor, destination, own=isolated, transport=transport).to(total.dtype)
        if total.is_sparse and not term.is_sparse:
            # Only dense plus sparse is an operator; the sum of two is the same to the bit.
            total, term = term, total
        # Repeated indices are summed first: where they meet dense memory, CUDA would add them in any order.
        total = total + (term.coalesce() if term.is_sparse and not total.is_sparse else term)
    return total.to(dtype)


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]],
    destination: torch.device,
    buffer_size: int,
    transport: Transport = STAR,
    travelling: Travelling | None = None,
    *,
    isolated: bool = False,
) -> list[Tensor]:
    """For every position the sum over slots, in slot order; dense tensors travel in flat buckets."""
    first = inputs[0]
    if len(inputs) == 1:
        return [send(tensor, destination, transport=transport) for tensor in first]
    results = list(first)
    flat_ones = travel_flat_on_every_slot(inputs)
    buckets, _ = plan_buckets(first, buffer_size, candidates=flat_ones, keep_repeats=False)
    for index in set(range(len(first))).difference(flat_ones):
        results[index] = _one_by_one([tensors[index] for tensors in inputs], destination, transport, isolated)
    for bucket in buckets:
        totals = _sum_bucket(bucket, inputs, destination, transport, travelling, isolated)
        for index, total in zip(bucket.indices, totals, strict=True):
            results[index] = total
    return results


def travel_flat_on_every_slot(inputs: Sequence[Sequence[Tensor]]) -> list[int]:
    """The positions whose tensors a flat copy expresses, and which are with the others of their slot."""
    positions = list(range(len(inputs[0])))
    for tensors in inputs:
        device = tensors[0].device if tensors else None
        positions = [i for i in positions if travels_flat(tensors[i]) and tensors[i].device == device]
    return positions


def _sum_bucket(
    bucket: Bucket,
    inputs: Sequence[Sequence[Tensor]],
    destination: torch.device,
    transport: Transport,
    travelling: Travelling | None,
    isolated: bool,
) -> list[Tensor]:
    dtype = inputs[0][bucket.indices[0]].dtype
    is_there = [tensors[bucket.indices[0]].device == destination for tensors in inputs]
    if summed_in(dtype) == dtype and all(is_there) and not isolated:
        # Nothing has to travel, so nothing has to be flattened.
        terms = [[tensors[i] for i in bucket.indices] for tensors in inputs]
        totals = _torch.foreach_add(terms[0], terms[1])
        for term in terms[2:]:
            _torch.foreach_add_(totals, term)
        return list(totals)

    flats = (flatten(bucket, tensors) for tensors in inputs)
    return unflatten(bucket, add_flat(flats, destination, transport, travelling, isolated=isolated))


def add_flat(
    flats: Iterable[Tensor],
    destination: torch.device,
    transport: Transport,
    travelling: Travelling | None,
    *,
    isolated: bool,
) -> Tensor:
    """The sum, in the order given, on ``destination``. The buffers are the caller's to give away."""

    def brought(flats: Iterable[Tensor]) -> Iterator[Tensor]:
        for place, flat in enumerate(flats):
            # The first slot's is at home on the destination; what isolated slots have there travels all the same.
            yield transport.send(flat, destination) if isolated and place and flat.device == destination else flat

    if travelling is None:
        return transport.add_up(brought(flats), destination)
    flats = [*flats]
    # Memory of the sum is made outside, so that it belongs to the stream that was current there.
    total = flats[0] if flats[0].device == destination else torch.empty_like(flats[0], device=destination)
    with travelling([*flats, total]):
        added = transport.add_up(brought(flats), destination)
        if added.data_ptr() != total.data_ptr():
            total.copy_(added)
    return total


def scatter(
    tensor: Tensor,
    devices: Sequence[torch.device],
    sizes: Sequence[int],
    dim: int,
    transport: Transport = STAR,
    *,
    own: bool = False,
) -> list[Tensor]:
    """Consecutive chunks of the given sizes along ``dim``; chunks that need not move are views.

    Slots other than the first get their ``own`` storage where the caller says so.
    """
    if len(sizes) == 1:
        return [send(tensor, devices[0], transport=transport)]
    if tensor.layout is torch.sparse_coo:
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        chunks = [tensor.detach().narrow_copy(dim, start, size) for start, size in zip(starts, sizes, strict=True)]
    else:
        chunks = list(torch.split(tensor.detach(), list(sizes), dim))
    return [
        same_kind(send(chunk, device, own=own and slot > 0, transport=transport), tensor)
        for slot, (chunk, device) in enumerate(zip(chunks, devices, strict=True))
    ]


def gather(tensors: Sequence[Tensor], dim: int, destination: torch.device, transport: Transport = STAR) -> Tensor:
    """The tensors one after the other along ``dim``; one alone is handed through if it is there already."""
    if len(tensors) == 1:
        return send(tensors[0], destination, transport=transport)
    if all(tensor.device == destination for tensor in tensors) or not all(map(travels_flat, tensors)):
        return torch.cat([send(tensor, destination, transport=transport) for tensor in tensors], dim)
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    stride = dense_stride(shape, torch.empty_like(first, device="meta").stride())
    out = torch.empty_strided(shape, stride, dtype=first.dtype, device=destination)
    return gather_into(out, tensors, dim, transport)


def gather_into(out: Tensor, tensors: Sequence[Tensor], dim: int, transport: Transport = STAR) -> Tensor:
    """Copies the tensors into consecutive parts of ``out`` along ``dim``."""
    for part, tensor in zip(torch.split(out, [t.shape[dim] for t in tensors], dim), tensors, strict=True):
        transport.copy(part, tensor)
    return out
