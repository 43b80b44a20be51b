"""`Transport`: the base class of all transports. It copies tensors to slots and sums them over slots, in flat buckets.

A copy begins after all earlier work on the current streams of both devices, and later work there begins after the copy:
to order a copy, it is enough to make one of the two streams wait. The host waits for copies from and to host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.buckets import Bucket, Planned, flatten, plan_buckets, travels_flat, unflatten
from dataparallel.comm.checks import resized
from dataparallel.comm.kinds import same_kind, send_by_torch
from dataparallel.comm.streams.current import RECEIVING, SENDING, piece_streams, wavefront
from dataparallel.comm.streams.held import hold_for_peers
from dataparallel.comm.tables import TensorRow, copies, summed_in

Allocate: TypeAlias = "Callable[..., Tensor]"
"""Makes a tensor without values, like another one and on the device ``device``."""

_OVERLAP_ABOVE_BYTES = 2**22
"""Terms of a sum above this size are sent on another stream of a device than it receives on, at the same time."""


class FlatBroadcast(NamedTuple):
    """The broadcast of one bucket, before ``send`` sends its flat buffer into ``buffers``.

    ``bucket`` has positions in ``tensors``, the sources; ``indices`` are those in the caller's list.
    """

    indices: Sequence[int]
    bucket: Bucket
    tensors: Sequence[Tensor]
    send: Callable[[Tensor], Any]
    buffers: Sequence[Tensor]


Later: TypeAlias = "Callable[[FlatBroadcast], object]"
"""Receives the broadcast of a bucket, and launches it later."""


class Transport:
    """Copies and sums tensors across devices. Results own their memory unless a method says otherwise."""

    # ---- how data moves: what a transport defines --------------------------------------------------------------------

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of the tensor's data on ``device``. By default torch copies it."""
        return send_by_torch(tensor, device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the data into ``target``, of the same shape, on any device. By default torch copies it."""
        target.copy_(source)

    def copy_each(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies source i into target i, unless it is the same tensor. The caller holds the memory for peers."""
        for target, source in zip(targets, sources, strict=True):
            if target is not source:
                self.copy(target, source)

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the flat buffer ``source`` into ``buffers`` of its size. By default along a star.

        The buffers are on distinct devices other than the source's.
        """
        self.execute(copies(buffers, [source] * len(buffers)))

    def add_up(self, flats: Sequence[Tensor], destination: torch.device) -> Tensor:
        """The sum of flat buffers, added in the order given, on ``destination``. It may overwrite the buffers."""
        first, wide = flats[0], summed_in(flats[0].dtype)
        is_there = first.device == destination and first.dtype == wide
        total = first if is_there else torch.empty_like(first, dtype=wide, device=destination)
        self.execute([TensorRow(total, flats)])
        return total.to(first.dtype)

    def execute(self, rows: Sequence[TensorRow], empty: Allocate = torch.empty_like) -> None:
        """Copies and adds what a plan of ``comm.tables`` says, on the current streams. Memory is held for peers once.

        ``empty`` allocates the buffers that receive terms.
        """
        if all(len(row.terms) == 1 for row in rows):
            received = [row.target for row in rows]
            self.copy_each(received, [row.terms[0] for row in rows])
        else:
            received = self.add_terms(rows, empty)
        hold_for_peers(received, [term for row in rows for term in row.terms])

    def add_terms(self, rows: Sequence[TensorRow], empty: Allocate) -> list[Tensor]:
        """Executes rows with several terms, and returns the memory to hold for peers: that which has received terms.

        Where each device adds terms of all, it receives in each step from another one than the others do, so that all
        links are busy.
        """
        buffers: dict[int, Tensor] = {}
        devices = {tensor.device for row in rows for tensor in (row.target, *row.terms)}
        can_overlap = len(rows) > 1 and sum(row.terms[0].nbytes for row in rows) > _OVERLAP_ABOVE_BYTES
        with piece_streams(devices, 2 if can_overlap else 1) as streams:
            for step, at in wavefront(max(len(row.terms) for row in rows), len(rows)):
                target, terms = rows[at]
                if step >= len(terms):
                    continue
                term = terms[step]
                streams.use(target.device, RECEIVING)
                if term.device != target.device:
                    needs_buffer = step > 0 or term.dtype != target.dtype
                    if needs_buffer and at not in buffers:
                        buffers[at] = empty(term, device=target.device)
                    received = buffers[at] if needs_buffer else target
                    streams.use(term.device, SENDING)
                    self.copy(received, term)
                    term = received
                if step:
                    target.add_(term)
                elif term.data_ptr() != target.data_ptr():
                    target.copy_(term)
        return [*buffers.values(), *(row.target for row in rows)]

    # ---- one tensor --------------------------------------------------------------------------------------------------

    def to_device(self, tensor: Tensor, device: torch.device, *, own: bool = False) -> Tensor:
        """``tensor`` on ``device``. If it is there already: the tensor itself, or a clone if ``own``."""
        if tensor.device == device:
            return same_kind(Tensor.clone(Tensor.detach(tensor)), tensor) if own else tensor
        sent = self.send(Tensor.detach(tensor), device)
        hold_for_peers([sent], [tensor])
        return same_kind(sent, tensor, self.send)

    def _broadcast_singly(self, tensor: Tensor, devices: Sequence[torch.device], own: bool) -> list[Tensor]:
        if own:
            return [self.to_device(tensor, device, own=slot > 0) for slot, device in enumerate(devices)]
        sent = {device: self.to_device(tensor, device) for device in dict.fromkeys(devices)}
        return [sent[device] for device in devices]

    def broadcast_into(self, out: Sequence[Tensor], tensor: Tensor) -> None:
        """Copies ``tensor`` into each of ``out``, whose dtypes may differ from its own."""
        both = [tensor, *out]
        are_apart = len({t.device for t in both}) == len(both)
        # A device may pass on the values that it received, so no target may have rounded them to another dtype.
        are_alike = all(t.dtype == tensor.dtype for t in out)
        if are_apart and are_alike and all(travels_flat(t) and t.is_contiguous() for t in both):
            self.broadcast_flat(tensor.view(-1), [target.view(-1) for target in out])
        else:
            self.execute(copies(out, [tensor] * len(out)))

    def _sum_singly(self, inputs: Sequence[Tensor], destination: torch.device) -> Tensor:
        dtype = inputs[0].dtype
        total = Tensor.to(self.to_device(inputs[0], destination), summed_in(dtype))
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
        buckets, singles = planned or plan_buckets(tensors, buffer_size)
        for index in singles:
            for result, copy in zip(results, self._broadcast_singly(tensors[index], devices, own), strict=True):
                result[index] = copy
        for bucket in buckets:
            first = tensors[bucket.indices[0]]
            needing = [slot for slot, device in enumerate(devices) if device != first.device or (own and slot > 0)]
            if not needing:
                continue
            others = [device for device in dict.fromkeys(devices) if device != first.device]
            buffers = {device: torch.empty(bucket.numel, dtype=first.dtype, device=device) for device in others}
            send = partial(self.broadcast_flat, buffers=[*buffers.values()])
            if later is None:
                send(flat := flatten(bucket, tensors, own=False))
            else:
                later(FlatBroadcast(bucket.indices, bucket, tensors, send, [*buffers.values()]))
            arrived = {device: unflatten(bucket, buffer) for device, buffer in buffers.items()}
            for slot in needing:
                parts = arrived.pop(devices[slot], None) if own else arrived[devices[slot]]
                if parts is None:  # the device has the source, or another slot has what has arrived there
                    parts = unflatten(bucket, buffers.get(devices[slot], flat).clone())
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
        return unflatten(bucket, self.add_up([flatten(bucket, tensors) for tensors in inputs], destination))

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
        pairs = [*zip(chunks, devices, strict=True)]
        if all(map(travels_flat, chunks)):
            moved = [chunk if chunk.device == on else torch.empty_like(chunk, device=on) for chunk, on in pairs]
            self.execute(copies(moved, chunks))
        else:
            moved = [chunk if chunk.device == on else self.send(chunk, on) for chunk, on in pairs]
            hold_for_peers(moved, [tensor])
        return [same_kind(chunk, tensor, self.send) for chunk in moved]

    def gather(self, tensors: Sequence[Tensor], dim: int, destination: torch.device) -> Tensor:
        """The tensors one after the other along ``dim``. A single tensor on ``destination`` is returned as it is."""
        if len(tensors) == 1:
            return self.to_device(tensors[0], destination)
        if all(tensor.device == destination for tensor in tensors) or not all(map(travels_flat, tensors)):
            return torch.cat([self.to_device(tensor, destination) for tensor in tensors], dim)
        first = tensors[0]
        sizes = [tensor.shape[dim] for tensor in tensors]
        shape = resized(first.shape, dim, sum(sizes))
        stride = torch.empty_like(first, device="meta").stride()
        order = sorted(range(first.dim()), key=lambda dim: -stride[dim])
        out = torch.empty_permuted(shape, order, dtype=first.dtype, device=destination)
        self.execute(copies(torch.split(out, sizes, dim), tensors))
        return out
