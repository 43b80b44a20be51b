"""The cupy transport: many tensors copied, or summed over the slots, in one launch, without flattening.

``comm.cupy.launch`` launches; this room makes the memory for results, says where everything lies, and has plain copies
carry what the kernels cannot. It has not been run on a GPU, and is used only where a user asks for it (``cupy`` as the
transport). Only ``comm`` calls it, with arguments that ``comm`` has checked and with gradient recording off.

A bucket says how its tensors lie in a flat buffer. Where a tensor of the caller lies so already, a kernel needs no more
than its address; results are parts of flat buffers, whose addresses follow from those of the buffers.
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

from dataparallel.comm import copies
from dataparallel.comm.buckets import Bucket, Layout, is_dense, plan_buckets, travels_flat, unflatten
from dataparallel.comm.cupy import launch
from dataparallel.comm.cupy.tables import COPY_KERNEL, SUM_KERNELS
from dataparallel.comm.routes import STAR

__all__ = ["Kernels", "broadcast_coalesced", "broadcast_into", "reduce_add_coalesced"]


class Kernels:
    """A `dataparallel.comm.routes.Transport` whose flat buffers are copied and summed by kernels.

    Kernels need no flat buffers: `comm`, which knows this class, calls the functions below with the tensors themselves.
    """

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """One copy, by torch."""
        return STAR.send(tensor, device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """One copy, by torch."""
        STAR.copy(target, source)

    def spread(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """One launch."""
        broadcast_into(buffers, source)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """One launch; by torch's copies where the dtype has no kernel."""
        return reduce_add_coalesced([[flat] for flat in flats], destination)[0]


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], buffer_size: int = sys.maxsize, *, own: bool
) -> list[list[Tensor]]:
    """As `copies.broadcast_coalesced`, by one launch for each bucket, whose copies lie in one buffer."""
    results = [list(tensors) for _ in devices]
    buckets, left = plan_buckets(tensors, buffer_size, keep_repeats=False)
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
    first = tensors[bucket.indices[0]]
    needing = [slot for slot, device in enumerate(devices) if device != first.device or (own and slot > 0)]
    if not needing:
        return []
    bucket, addresses, left = _readable(bucket, [tensors], COPY_KERNEL.itemsize)
    nbytes = [layout.numel * first.itemsize for layout in bucket.layouts]
    buffers: list[Tensor] = []
    shared: dict[torch.device, list[Tensor]] = {}
    for slot in needing:
        device = devices[slot]
        parts = shared.get(device)
        if parts is None or (own and slot > 0):
            buffers.append(_room(bucket, first.dtype, device))
            parts = unflatten(bucket, buffers[-1])
            shared.setdefault(device, parts)
        for index, part in zip(bucket.indices, parts, strict=True):
            results[slot][index] = part
    addresses += [_addresses(buffer, nbytes) for buffer in buffers]
    launch.launch(COPY_KERNEL, addresses, nbytes, first.device, [buffer.device for buffer in buffers])
    return left


def broadcast_into(out: Sequence[Tensor], tensor: Tensor) -> None:
    """As `copies.broadcast_into`, by one launch for all that lie in memory as ``tensor`` does."""
    alike = [target for target in out if _lies_alike(target, tensor)]
    if not alike or _overlap([tensor, *alike]):
        copies.broadcast_into(out, tensor, STAR)
        return
    rows = [[each.data_ptr()] for each in (tensor, *alike)]
    launch.launch(COPY_KERNEL, rows, [tensor.nbytes], tensor.device, [target.device for target in alike])
    # Autograd does not see what kernels write, and has to know that these tensors have changed.
    increment_version(alike)
    written = {*map(id, alike)}
    if left := [target for target in out if id(target) not in written]:
        copies.broadcast_into(left, tensor, STAR)


def _lies_alike(target: Tensor, tensor: Tensor) -> bool:
    """Whether the bytes of ``tensor``, in the order in which they lie in memory, are those that ``target`` needs."""
    if target.dtype != tensor.dtype or not (travels_flat(target) and travels_flat(tensor)):
        return False
    if target.is_contiguous() and tensor.is_contiguous():
        return True
    return target.stride() == tensor.stride() and is_dense(tensor.shape, tensor.stride())


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether two dense tensors have memory in common; an address is one on all devices together."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.numel())
    return any(start < end for (_, end), (start, _) in pairwise(spans))


def reduce_add_coalesced(inputs: Sequence[Sequence[Tensor]], destination: torch.device) -> list[Tensor]:
    """As `copies.reduce_add_coalesced`, by one launch for each dtype."""
    first = inputs[0]
    results = list(first)
    flat_ones = copies.travel_flat_on_every_slot(inputs) if len(inputs) > 1 else []
    left = sorted({*range(len(first))}.difference(flat_ones))
    buckets, _ = plan_buckets(first, sys.maxsize, candidates=flat_ones, keep_repeats=False)
    for bucket in buckets:
        left += _summed(bucket, inputs, destination, results)
    rest = copies.reduce_add_coalesced([[tensors[i] for i in left] for tensors in inputs], destination, sys.maxsize)
    for index, total in zip(left, rest, strict=True):
        results[index] = total
    return results


def _summed(
    bucket: Bucket, inputs: Sequence[Sequence[Tensor]], destination: torch.device, results: list[Tensor]
) -> list[int]:
    """Puts sums of the bucket's tensors into ``results``; which ones it had to leave."""
    of_slots = [tensors[bucket.indices[0]] for tensors in inputs]
    dtype = of_slots[0].dtype
    kernel = SUM_KERNELS.get(dtype)
    if kernel is None:
        return bucket.indices
    bucket, addresses, left = _readable(bucket, inputs, kernel.itemsize)
    numels = [layout.numel for layout in bucket.layouts]
    buffer = _room(bucket, dtype, destination)
    for index, total in zip(bucket.indices, unflatten(bucket, buffer), strict=True):
        results[index] = total
    rows = [_addresses(buffer, [numel * dtype.itemsize for numel in numels]), *addresses]
    counts = [numel * (dtype.itemsize // kernel.itemsize) for numel in numels]
    launch.launch(kernel, rows, counts, destination, [tensor.device for tensor in of_slots])
    return left


def _readable(
    bucket: Bucket, inputs: Sequence[Sequence[Tensor]], alignment: int
) -> tuple[Bucket, list[list[int]], list[int]]:
    """The part of a bucket that kernels can read where it lies, on every slot.

    Args:
        bucket: planned for the first of ``inputs``, without keeping repeats.
        inputs: the tensors of each slot, with the same shapes, all of which travel flat.
        alignment: bytes, of which addresses have to be multiples.

    Returns:
        That part, the addresses of its tensors for each slot, and the indices of what is not in it.
    """
    odd: set[int] = set()
    addresses = []
    is_row_major = all(layout.row_major for layout, _ in bucket.runs)
    # For thousands of tensors it is several times as fast to ask one question of all than all questions of one.
    for tensors in inputs:
        members = [tensors[i] for i in bucket.indices]
        if not (is_row_major and all(map(Tensor.is_contiguous, members))):
            pairs = zip(members, bucket.layouts, strict=True)
            odd.update(k for k, (tensor, layout) in enumerate(pairs) if not _lies_as(tensor, layout))
        row = [*map(Tensor.data_ptr, members)]
        if reduce(or_, row) % alignment:
            odd.update(k for k, address in enumerate(row) if address % alignment)
        addresses.append(row)
    if not odd:
        return bucket, addresses, []
    kept = [k for k in range(len(bucket.indices)) if k not in odd]
    # What is in a bucket's order stays in it.
    part = Bucket.of([(bucket.indices[k], bucket.layouts[k]) for k in kept])
    return part, [[row[k] for k in kept] for row in addresses], [bucket.indices[k] for k in sorted(odd)]


def _lies_as(tensor: Tensor, layout: Layout) -> bool:
    """Whether the elements lie in memory as in a flat buffer: without holes, and in the order of the layout."""
    return tensor.is_contiguous() if layout.row_major else tensor.stride() == layout.core_stride


def _room(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer for the bucket's tensors."""
    return torch.empty(sum([layout.numel for layout in bucket.layouts]), dtype=dtype, device=device)


def _addresses(buffer: Tensor, nbytes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin that follow each other from the start of ``buffer``, as `unflatten` has them."""
    return [*accumulate(nbytes, initial=buffer.data_ptr())][:-1]
