"""`Cupy`: a transport whose kernels copy many tensors in one launch, or sum them over the slots, without flattening.

A kernel needs only the address of a tensor that is dense in memory, as in a flat buffer; plain copies carry all others.
This transport has not run on a GPU. It is used only if a user asks for it (``transport="cupy"``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dataparallel.comm import kernels
from dataparallel.comm.buckets import Bucket, FlatLayout, Planned, is_dense, plan_buckets, travels_flat, unflatten
from dataparallel.comm.kernels import COPY_KERNEL, SUM_KERNELS
from dataparallel.comm.routes import STAR
from dataparallel.comm.transport import FlatBroadcast, Later, Transport, Travelling, travel_flat_on_every_slot


class Cupy(Transport):
    """The transport by kernels, which read and write tensors where they lie, on any of the devices."""

    sums_flat_buffers = False

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies with one launch."""
        self.broadcast_into(buffers, source)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """Adds with one launch, or by torch's copies if the dtype has no kernel."""
        return self.reduce_add_coalesced([[flat] for flat in flats], destination)[0]

    def add_flat(
        self, flats: Iterable[Tensor], destination: torch.device, *, travelling: Travelling | None = None
    ) -> Tensor:
        """As `add_up`, outside of ``travelling``: the launch orders the streams of all devices itself."""
        return self.add_up(flats, destination)

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
        """Copies each bucket with one launch. On a device the copies of a bucket lie in one buffer."""
        results = [list(tensors) for _ in devices]
        buckets, unread = plan_buckets(tensors, buffer_size, keep_repeats=False)
        for bucket in buckets:
            unread += _copy_bucket(bucket, tensors, devices, own, results, later)
        plain_copies = STAR.broadcast_coalesced([tensors[i] for i in unread], devices, own=own)
        for result, copies in zip(results, plain_copies, strict=True):
            for index, copy in zip(unread, copies, strict=True):
                result[index] = copy
        return results

    def broadcast_into(self, out: Sequence[Tensor], tensor: Tensor) -> None:
        """Copies with one launch if all of ``out`` lie in memory as ``tensor`` does; else by torch's copies."""
        if not out or not all(_lies_alike(target, tensor) for target in out) or _overlap([tensor, *out]):
            STAR.broadcast_into(out, tensor)
            return
        rows = [[each.data_ptr()] for each in (tensor, *out)]
        kernels.launch(COPY_KERNEL, rows, [tensor.nbytes], tensor.device, [target.device for target in out])
        # Autograd does not see writes by kernels, so this tells it that these tensors have changed.
        increment_version(out)

    def reduce_add_coalesced(
        self,
        inputs: Sequence[Sequence[Tensor]],
        destination: torch.device,
        buffer_size: int = sys.maxsize,
    ) -> list[Tensor]:
        """Adds with one launch for each dtype, whatever the ``buffer_size``."""
        first = inputs[0]
        results = list(first)
        flat_ones = travel_flat_on_every_slot(inputs) if len(inputs) > 1 else []
        unread = sorted({*range(len(first))}.difference(flat_ones))
        buckets, _ = plan_buckets(first, sys.maxsize, candidates=flat_ones, keep_repeats=False)
        for bucket in buckets:
            unread += _sum_bucket(bucket, inputs, destination, results)
        plain_sums = STAR.reduce_add_coalesced([[tensors[i] for i in unread] for tensors in inputs], destination)
        for index, total in zip(unread, plain_sums, strict=True):
            results[index] = total
        return results


def _copy_bucket(
    bucket: Bucket,
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    own: bool,
    results: Sequence[list[Tensor]],
    later: Later | None,
) -> list[int]:
    """Puts copies of the bucket's tensors into ``results``. Returns the indices of tensors that kernels cannot read.

    ``later`` receives the launch.
    """
    first = tensors[bucket.indices[0]]
    needing = [slot for slot, device in enumerate(devices) if device != first.device or (own and slot > 0)]
    if not needing:
        return []
    bucket, addresses, unread = _split_off_readable(bucket, [tensors], COPY_KERNEL.itemsize)
    nbytes = [layout.numel * first.itemsize for layout in bucket.layouts]
    buffers: list[Tensor] = []
    shared: dict[torch.device, list[Tensor]] = {}
    for slot in needing:
        device = devices[slot]
        parts = shared.get(device)
        if parts is None or (own and slot > 0):
            buffers.append(_flat_buffer(bucket, first.dtype, device))
            parts = unflatten(bucket, buffers[-1])
            shared.setdefault(device, parts)
        for index, part in zip(bucket.indices, parts, strict=True):
            results[slot][index] = part
    addresses += [_addresses(buffer, nbytes) for buffer in buffers]

    def read_and_write() -> Tensor:
        kernels.launch(COPY_KERNEL, addresses, nbytes, first.device, [buffer.device for buffer in buffers])
        return buffers[0]

    if later is None:
        read_and_write()
    else:
        sources = [tensors[i] for i in bucket.indices]
        later(FlatBroadcast(bucket.indices, read_and_write, lambda flat: None, buffers, sources))
    return unread


def _lies_alike(target: Tensor, tensor: Tensor) -> bool:
    """True if a plain copy of the memory of ``tensor`` makes ``target`` equal to it."""
    if target.dtype != tensor.dtype or not (travels_flat(target) and travels_flat(tensor)):
        return False
    if target.is_contiguous() and tensor.is_contiguous():
        return True
    return target.stride() == tensor.stride() and is_dense(tensor.shape, tensor.stride())


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """True if two dense tensors have memory in common. CUDA addresses are unique across devices."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    return any(start < end for (_, end), (start, _) in pairwise(spans))


def _sum_bucket(
    bucket: Bucket, inputs: Sequence[Sequence[Tensor]], destination: torch.device, results: list[Tensor]
) -> list[int]:
    """Puts sums of the bucket's tensors into ``results``. Returns the indices of tensors that kernels cannot read."""
    first_on_slots = [tensors[bucket.indices[0]] for tensors in inputs]
    dtype = first_on_slots[0].dtype
    kernel = SUM_KERNELS.get(dtype)
    if kernel is None:
        return bucket.indices
    bucket, addresses, unread = _split_off_readable(bucket, inputs, kernel.itemsize)
    numels = [layout.numel for layout in bucket.layouts]
    buffer = _flat_buffer(bucket, dtype, destination)
    for index, total in zip(bucket.indices, unflatten(bucket, buffer), strict=True):
        results[index] = total
    rows = [_addresses(buffer, [numel * dtype.itemsize for numel in numels]), *addresses]
    counts = [numel * (dtype.itemsize // kernel.itemsize) for numel in numels]
    kernels.launch(kernel, rows, counts, destination, [tensor.device for tensor in first_on_slots])
    return unread


def _split_off_readable(
    bucket: Bucket, inputs: Sequence[Sequence[Tensor]], alignment: int
) -> tuple[Bucket, list[list[int]], list[int]]:
    """Returns a bucket of the tensors that kernels can read on every slot, their addresses, and all other indices.

    The bucket was planned with ``keep_repeats=False``. Addresses have to be multiples of ``alignment`` bytes.
    """
    unreadable: set[int] = set()
    addresses = []
    # With thousands of tensors, one ``map`` over all of them is several times faster than a loop.
    for tensors in inputs:
        members = [tensors[i] for i in bucket.indices]
        if not (bucket.row_major and all(map(Tensor.is_contiguous, members))):
            pairs = zip(members, bucket.layouts, strict=True)
            unreadable.update(k for k, (tensor, layout) in enumerate(pairs) if not _lies_as(tensor, layout))
        row = [*map(Tensor.data_ptr, members)]
        if reduce(or_, row) % alignment:
            unreadable.update(k for k, address in enumerate(row) if address % alignment)
        addresses.append(row)
    if not unreadable:
        return bucket, addresses, []
    kept = [k for k in range(len(bucket.indices)) if k not in unreadable]
    # `Bucket.of` keeps the order of a bucket's tensors.
    readable = Bucket.of([(bucket.indices[k], bucket.layouts[k]) for k in kept])
    return readable, [[row[k] for k in kept] for row in addresses], [bucket.indices[k] for k in sorted(unreadable)]


def _lies_as(tensor: Tensor, layout: FlatLayout) -> bool:
    """True if the elements lie in memory as in a flat buffer: without holes, and in the order of the layout."""
    return tensor.is_contiguous() if layout.row_major else tensor.stride() == layout.core_stride


def _flat_buffer(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new flat buffer for the bucket's tensors."""
    return torch.empty(bucket.numel, dtype=dtype, device=device)


def _addresses(buffer: Tensor, nbytes: Sequence[int]) -> list[int]:
    """The addresses of consecutive parts of ``buffer`` with these sizes, in the order of `unflatten`."""
    return [*accumulate(nbytes, initial=buffer.data_ptr())][:-1]
