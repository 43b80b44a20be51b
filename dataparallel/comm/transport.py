"""`Transport`: the base class of all transports. It copies tensors to slots and sums them over slots, in flat buckets.

A copy begins after all earlier work on the current streams of both devices, and later work there begins after the copy:
to order a copy, it is enough to make one of the two streams wait. The host waits for copies from and to host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.buckets import (
    Bucket,
    Planned,
    dense_stride,
    flatten,
    plan_buckets,
    travels_flat,
    unflatten,
)
from dataparallel.comm.kinds import same_kind, send_by_torch
from dataparallel.comm.streams.current import RECEIVING, SENDING, piece_streams, wavefront
from dataparallel.comm.streams.held import hold_for_peers


class Allocate(Protocol):
    """Makes a tensor without values, like another one and on ``device``."""

    def __call__(self, like: Tensor, /, *, device: torch.device) -> Tensor: ...


_OVERLAP_ABOVE_BYTES = 2**22
"""Matrices above this size are sent on another stream of a device than it receives on, at the same time."""


class FlatBroadcast(NamedTuple):
    """The broadcast of one bucket, before it is launched.

    Attributes:
        indices: positions of the bucket's tensors in the caller's list.
        read: makes the flat buffer from the tensors' current values. After that the tensors may be changed.
        send: sends the flat buffer into ``buffers``.
        buffers: the buffers that receive, one for each device.
        sources: the bucket's tensors.
    """

    indices: Sequence[int]
    read: Callable[[], Tensor]
    send: Callable[[Tensor], Any]
    buffers: Sequence[Tensor]
    sources: Sequence[Tensor]


Later: TypeAlias = "Callable[[FlatBroadcast], object]"
"""Receives the broadcast of a bucket, and launches it later."""


class Transport:
    """Copies and sums tensors across devices. Results own their memory unless a method says otherwise."""

    @property
    def flattens_single_tensors(self) -> bool:
        """True if a call with one tensor uses a flat buffer too, because `broadcast_flat` is faster than `send`."""
        return True

    # ---- how data moves: what a transport defines --------------------------------------------------------------------

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of the tensor's data on ``device``. By default torch copies it."""
        return send_by_torch(tensor, device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the data into ``target``, of the same shape, on any device. By default torch copies it."""
        target.copy_(source)

    def copy_each(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies source i into target i, by default one after the other."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def send_each(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
        """Each tensor on its device: itself if it is there already. By default they are sent one after the other."""
        pairs = zip(tensors, devices, strict=True)
        return [tensor if device == tensor.device else self.send(tensor, device) for tensor, device in pairs]

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the flat buffer ``source`` into ``buffers`` of its size, by default as `copy_each`.

        The buffers are on distinct devices other than the source's.
        """
        self.copy_each(buffers, [source] * len(buffers))

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """The sum of flat buffers, added in the order given, on ``destination``. It may overwrite the buffers.

        By default the destination takes a buffer from ``flats`` when it has added the buffer before.
        """
        remaining = iter(flats)
        first = next(remaining)
        total = self.to_device(first, destination).to(summed_in(first.dtype))
        for flat in remaining:
            total.add_(self.to_device(flat, destination))
        return total.to(first.dtype)

    def reduce_scatter(self, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Allocate) -> None:
        """`comm.reduce_scatter`. Each device receives its row of each matrix, and adds it.

        In each step a device receives from another one than the others do, so that all links are busy.
        """
        buffers: dict[int, Tensor] = {}
        devices = [tensor.device for tensor in (*matrices, *out)]
        with piece_streams(devices, 2 if matrices[0].nbytes > _OVERLAP_ABOVE_BYTES else 1) as streams:
            for slot, owner in wavefront(len(matrices), len(out)):
                row, total = matrices[slot][owner], out[owner]
                streams.use(total.device, RECEIVING)
                if row.device != total.device:
                    received = total
                    if slot or row.dtype != total.dtype:
                        if owner not in buffers:
                            buffers[owner] = empty(row, device=total.device)
                        received = buffers[owner]
                    streams.use(row.device, SENDING)
                    self.copy(received, row)
                    row = received
                if slot:
                    total.add_(row)
                elif row is not total:
                    total.copy_(row)
        hold_for_peers([*buffers.values()], matrices)

    # ---- one tensor --------------------------------------------------------------------------------------------------

    def to_device(self, tensor: Tensor, device: torch.device, *, own: bool = False) -> Tensor:
        """``tensor`` on ``device``. If it is there already: the tensor itself, or a clone if ``own``."""
        if tensor.device == device:
            return same_kind(Tensor.clone(Tensor.detach(tensor)), tensor) if own else tensor
        sent = self.send(Tensor.detach(tensor), device)
        hold_for_peers([sent], [tensor])
        return same_kind(sent, tensor, self.send)

    def broadcast(self, tensor: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
        """One tensor for each slot. Slots on one device share one copy."""
        if self.flattens_single_tensors and travels_flat(tensor):
            return [copy for (copy,) in self.broadcast_coalesced([tensor], devices, own=False)]
        return self._broadcast_singly(tensor, devices, own=False)

    def _broadcast_singly(self, tensor: Tensor, devices: Sequence[torch.device], own: bool) -> list[Tensor]:
        sent: dict[torch.device, Tensor] = {}
        results = []
        for slot, device in enumerate(devices):
            if own and slot > 0:
                results.append(self.to_device(tensor, device, own=True))
            else:
                if device not in sent:
                    sent[device] = self.to_device(tensor, device)
                results.append(sent[device])
        return results

    def broadcast_into(self, out: Sequence[Tensor], tensor: Tensor) -> None:
        """Copies ``tensor`` into each of ``out``, whose dtypes may differ from its own."""
        devices = [target.device for target in out]
        are_apart = len({tensor.device, *devices}) == 1 + len(devices)
        # A device may pass on the values that it received, so no target may have rounded them to another dtype.
        if (
            are_apart
            and all(target.dtype == tensor.dtype for target in out)
            and all(t.dim() == 1 and travels_flat(t) and t.is_contiguous() for t in (tensor, *out))
        ):
            self.broadcast_flat(tensor, out)
        else:
            self.copy_each(out, [tensor] * len(out))
            hold_for_peers(out, [tensor])

    def reduce_add(self, inputs: Sequence[Tensor], destination: torch.device) -> Tensor:
        """The sum, in slot order, on ``destination``. A single input is returned as it is."""
        if self.flattens_single_tensors and len(inputs) > 1 and all(map(travels_flat, inputs)):
            (total,) = self.reduce_add_coalesced([[tensor] for tensor in inputs], destination)
            return total
        return self._sum_singly(inputs, destination)

    def _sum_singly(self, inputs: Sequence[Tensor], destination: torch.device) -> Tensor:
        dtype = inputs[0].dtype
        total = self.to_device(inputs[0], destination)
        if len(inputs) == 1:
            return total
        total = Tensor.to(total, summed_in(dtype))
        for tensor in inputs[1:]:
            term = Tensor.to(self.to_device(tensor, destination), total.dtype)
            if total.is_sparse and not term.is_sparse:
                # torch adds sparse to dense, not dense to sparse. Two terms have the same sum in either order.
                total, term = term, total
            # Repeated indices are summed first: added to dense memory, CUDA would take them in any order.
            total = total + (term.coalesce() if term.is_sparse and not total.is_sparse else term)
        return Tensor.to(total, dtype)

    # ---- many tensors, in flat buckets -------------------------------------------------------------------------------

    def broadcast_coalesced(
        self,
        tensors: Sequence[Tensor],
        devices: Sequence[torch.device],
        buffer_size: int = sys.maxsize,
        *,
        own: bool,
        planned: Planned | None = None,
        later: Later | None = None,
    ) -> list[list[Tensor]]:
        """`comm.broadcast_coalesced`. Slots on one device share one copy; if ``own``, each slot has its own.

        ``later`` cannot go with ``own``, which clones buffers that have arrived.
        """
        results = [list(tensors) for _ in devices]
        # If all slots are on one device, tensors on that device stay, unless each slot needs its own copy.
        stays = devices[0] if len({*devices}) == 1 and not (own and len(devices) > 1) else None
        moving = [i for i, tensor in enumerate(tensors) if tensor.device != stays]
        if planned is None or len(moving) < len(tensors):
            planned = plan_buckets(tensors, buffer_size, candidates=moving)
        buckets, singles = planned
        for index in singles:
            for result, copy in zip(results, self._broadcast_singly(tensors[index], devices, own), strict=True):
                result[index] = copy
        for bucket in buckets:
            source = tensors[bucket.indices[0]].device
            needing = [slot for slot, device in enumerate(devices) if device != source or (own and slot > 0)]
            if not needing:
                continue
            # The first slot on each other device receives a buffer.
            first_on = {device: devices.index(device) for device in devices if device != source}
            dtype = tensors[bucket.indices[0]].dtype
            buffers = {slot: torch.empty(bucket.numel, dtype=dtype, device=on) for on, slot in first_on.items()}
            received = [*buffers.values()]
            if later is None:
                flat = flatten(bucket, tensors)
                self.broadcast_flat(flat, received)
            else:
                read, send = partial(flatten, bucket, tensors), partial(self.broadcast_flat, buffers=received)
                later(FlatBroadcast(bucket.indices, read, send, received, [tensors[i] for i in bucket.indices]))
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

    def reduce_add_coalesced(
        self,
        inputs: Sequence[Sequence[Tensor]],
        destination: torch.device,
        buffer_size: int = sys.maxsize,
    ) -> list[Tensor]:
        """For each position the sum over slots, in slot order. Dense tensors travel in flat buckets."""
        first = inputs[0]
        if len(inputs) == 1:
            return [self.to_device(tensor, destination) for tensor in first]
        results = list(first)
        # The positions whose tensors travel flat on every slot, on the device of that slot's first tensor.
        flat_ones = [
            i
            for i in range(len(first))
            if all(travels_flat(tensors[i]) and tensors[i].device == tensors[0].device for tensors in inputs)
        ]
        buckets, _ = plan_buckets(first, buffer_size, candidates=flat_ones, keep_repeats=False)
        for index in set(range(len(first))).difference(flat_ones):
            results[index] = self._sum_singly([tensors[index] for tensors in inputs], destination)
        for bucket in buckets:
            totals = self._sum_bucket(bucket, inputs, destination)
            for index, total in zip(bucket.indices, totals, strict=True):
                results[index] = total
        return results

    def _sum_bucket(
        self, bucket: Bucket, inputs: Sequence[Sequence[Tensor]], destination: torch.device
    ) -> list[Tensor]:
        dtype = inputs[0][bucket.indices[0]].dtype
        is_there = [tensors[bucket.indices[0]].device == destination for tensors in inputs]
        if summed_in(dtype) == dtype and all(is_there):
            # No tensor has to travel, so none has to be flattened.
            terms = [[tensors[i] for i in bucket.indices] for tensors in inputs]
            totals = _torch.foreach_add(terms[0], terms[1])
            for term in terms[2:]:
                _torch.foreach_add_(totals, term)
            return list(totals)
        # A generator, because a star flattens the next slot's tensors when it has added the buffer before.
        flats = (flatten(bucket, tensors) for tensors in inputs)
        return unflatten(bucket, self.add_up(flats, destination))

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def scatter(self, tensor: Tensor, devices: Sequence[torch.device], sizes: Sequence[int], dim: int) -> list[Tensor]:
        """Consecutive chunks of the given sizes along ``dim``. Chunks that need not move are views."""
        if len(sizes) == 1:
            return [self.to_device(tensor, devices[0])]
        if tensor.layout is torch.sparse_coo:
            starts = [sum(sizes[:k]) for k in range(len(sizes))]
            whole = Tensor.detach(tensor)
            chunks = [Tensor.narrow_copy(whole, dim, start, size) for start, size in zip(starts, sizes, strict=True)]
        else:
            chunks = list(torch.split_with_sizes(Tensor.detach(tensor), list(sizes), dim))
        moved = self.send_each(chunks, devices)
        hold_for_peers(moved, [tensor])
        if type(tensor) is Tensor and not tensor.__dict__:
            return moved
        return [same_kind(chunk, tensor, self.send) for chunk in moved]

    def scatter_coalesced(
        self, tensors: Sequence[Tensor], devices: Sequence[torch.device], sizes: Sequence[int], dim: int
    ) -> list[list[Tensor]]:
        """For each tensor what `scatter` returns. All are on one device, and `travels_flat` is true for each.

        What one slot gets travels in a flat buffer for each dtype.
        """
        split = [torch.split_with_sizes(Tensor.detach(tensor), list(sizes), dim) for tensor in tensors]
        by_slot = [[*chunks] for chunks in zip(*split, strict=True)]
        for chunks, device in zip(by_slot, devices, strict=True):
            for bucket in plan_buckets(chunks)[0] if device != tensors[0].device else ():
                received = unflatten(bucket, self.to_device(flatten(bucket, chunks), device))
                for index, chunk in zip(bucket.indices, received, strict=True):
                    chunks[index] = chunk
        return [[*chunks] for chunks in zip(*by_slot, strict=True)]

    def gather(self, tensors: Sequence[Tensor], dim: int, destination: torch.device) -> Tensor:
        """The tensors one after the other along ``dim``. A single tensor on ``destination`` is returned as it is."""
        if len(tensors) == 1:
            return self.to_device(tensors[0], destination)
        if all(tensor.device == destination for tensor in tensors) or not all(map(travels_flat, tensors)):
            return torch.cat([self.to_device(tensor, destination) for tensor in tensors], dim)
        first = tensors[0]
        shape = list(first.shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        stride = dense_stride(shape, torch.empty_like(first, device="meta").stride())
        out = torch.empty_strided(shape, stride, dtype=first.dtype, device=destination)
        return self.gather_into(out, tensors, dim)

    def gather_into(self, out: Tensor, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """Copies the tensors into consecutive parts of ``out`` along ``dim``."""
        self.copy_each(torch.split(out, [t.shape[dim] for t in tensors], dim), tensors)
        hold_for_peers([out], tensors)
        return out


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial sums: ``float32`` for 16-bit floats, so that a sum is rounded once; else ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
