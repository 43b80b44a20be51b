"""Copies whose memory stays: each call writes the source's current values to it, and undoes what ``forward`` did to it.

`MemoryOfCopies` gives copies back the memory that they were made with. `CurrentValues` sends values there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.buckets import Bucket, flatten, plan_buckets, unflatten
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.transport import FlatBroadcast
from dataparallel.profiling import note_copy
from dataparallel.replicas.plan import ModulePlan

# Functions in C: they are called for thousands of tensors at each call.
_READS: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.stride,
    attrgetter("shape"),
    attrgetter("dtype"),
)


class MemoryOfCopies:
    """The memory that ``copies``, which are strided tensors, have now.

    ``forward`` gives a copy other memory by ``set_`` or ``.data =``, or as ``flatten_parameters`` of torch's RNNs does
    on CUDA.
    """

    def __init__(self, copies: Sequence[Tensor]) -> None:
        self._copies = copies
        self._memory = [copy.data for copy in copies]
        self._reads = (*_READS, Tensor.is_conj) if any(copy.is_complex() for copy in copies) else _READS
        self._places = self._read(copies)

    def restore(self) -> bool:
        """Gives each copy its memory back and leaves its version as it is.

        Returns ``False`` if that memory is somewhere else now, because its storage has been resized.
        """
        found = self._read(self._copies)
        if found == self._places:
            return True
        places = self._read(self._memory)
        for copy, memory, now, own in zip(
            self._copies, self._memory, zip(*found, strict=True), zip(*places, strict=True), strict=True
        ):
            if now != own:
                copy.data = memory
        return places == self._places

    def _read(self, tensors: Sequence[Tensor]) -> list[list[Any]]:
        return [list(map(read, tensors)) for read in self._reads]


class CurrentValues:
    """Sends the source's values to copies at each forward.

    Autograd does not notice the writes. If the source has not changed, the values are the same, and a graph that waits
    for its backward stays valid. If the version of a source's tensor has changed since the last forward, such a graph
    has used another value: the versions of the copies are changed too, so that its backward raises the error that torch
    raises on one device. Writes through ``.data`` change no version.

    Args:
        plan, slots: the source, and where its copies are.
        by_slot: for each slot a copy of each of the plan's tensors, as soon as it is made. The caller fills it in.
    """

    def __init__(self, plan: ModulePlan, slots: list[torch.device], by_slot: list[list[Tensor]]) -> None:
        self._tensors, self._slots, self._by_slot = plan.tensors, slots, by_slot
        recorded = {i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad}
        self._may_be_late = recorded.union(plan.parameters)
        self._at_once = plan.read_directly.union(recorded.difference(plan.parameters))
        # What each forward sends: flat buckets and single tensors, each with the memory that receives it, and sparse
        # tensors, each with whether every slot has its own copy.
        self._flat: list[tuple[Bucket, list[Tensor]]] = []
        self._singles: list[tuple[int, list[Tensor]]] = []
        self._sparse: list[tuple[int, bool]] = []
        self._versions: list[int] = []
        self._in_pass = -1  # the number of the backward in which the copies have got values

    def send_at_each_forward(self, indices: list[int], cap_bytes: int, own: bool) -> None:
        """Has `refresh` fill the memory of copies that were just made, as one buffer if it is in one piece.

        ``own``: slots on one device have their own copies.
        """
        sparse = [i for i in indices if self._tensors[i].layout not in (torch.strided, torch.jagged)]
        self._sparse += [(i, own) for i in sparse]
        indices = [i for i in indices if i not in sparse]
        slots = self._slots_with_memory(self._tensors[indices[0]].device, own) if indices else []
        if not slots:
            return
        buckets, singles = plan_buckets([self._tensors[i] for i in indices], cap_bytes)
        alone = [indices[k] for k in singles]
        for planned in buckets:
            members = [indices[k] for k in planned.indices]
            bucket = Bucket.of(list(zip(members, planned.layouts, strict=True)))
            flat = [_flat_buffer_of(self._by_slot[slot][members[0]]) for slot in slots]
            if all(_are_parts(self._by_slot[slot], bucket, buffer) for slot, buffer in zip(slots, flat, strict=True)):
                self._flat.append((bucket, flat))
            else:  # made by a transport with another order
                alone += members
        self._singles += [(i, [self._by_slot[slot][i].data for slot in slots]) for i in alone]

    def note_versions(self) -> None:
        """The copies were just made from the versions that the source's tensors have now."""
        self._versions, self._in_pass = _versions(self._tensors), _torch.current_graph_task_id()

    def _slots_with_memory(self, source: torch.device, own: bool) -> list[int]:
        """One slot for each copy that has its own memory. Tensors come from the device ``source``."""
        found: dict[Any, int] = {}
        for slot, device in enumerate(self._slots):
            if slot > 0 and (own or device != source):
                found.setdefault(slot if own else device, slot)
        return list(found.values())

    @torch.no_grad()
    def refresh(self, arrivals: Arrivals | None = None) -> None:
        """Gives the copies current values. ``arrivals``: parameters may still be on their way when this returns.

        A second forward inside one backward, as checkpoints run it, sends nothing that the first one has sent: threads
        of other devices still compute gradients from these copies, and nothing orders them after another write.
        """
        tensors, versions = self._tensors, _versions(self._tensors)
        former, self._in_pass = self._in_pass, _torch.current_graph_task_id()
        is_second = self._in_pass == former != -1
        sent = {i for i, version in enumerate(versions) if is_second and version == self._versions[i]}
        flat = [each for each in self._flat if not sent.issuperset(each[0].indices)]
        late = send_buckets(flat, tensors, () if arrivals is None else self._may_be_late)
        if arrivals is not None:
            self.launch(late, arrivals)
        for i, copies in self._singles:
            for copy in copies if i not in sent else ():
                note_copy("direct", tensors[i], copy.device)
                copy.copy_(tensors[i])
        for i, own in self._sparse:  # in new memory: a write may replace its indices
            if i in sent:
                continue
            on_slots = comm.broadcast_coalesced([tensors[i]], self._slots, own_storage=own)
            for on_slot, (values,) in zip(self._by_slot, on_slots, strict=True):
                if on_slot[i] is not tensors[i]:
                    on_slot[i].data = values
        if versions != self._versions:
            changed = [i for i, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new]
            # Slot 0's copies share the source's versions.
            torch.autograd.graph.increment_version([on_slot[i] for on_slot in self._by_slot[1:] for i in changed])
            self._versions = versions

    def launch(self, late: Sequence[FlatBroadcast], arrivals: Arrivals) -> None:
        """Launches the broadcasts of parameters in the order of use."""
        # Buckets with gradients were made in reverse order of their gradients, which is about the order of use.
        # Constant parameters have no gradients and go where they are registered.
        recorded = [broadcast for broadcast in late if self._tensors[broadcast.indices[0]].requires_grad]
        constant = [broadcast for broadcast in late if not self._tensors[broadcast.indices[0]].requires_grad]
        merged = heapq.merge(recorded, constant, key=lambda broadcast: min(broadcast.indices))
        arrivals.launch(merged, self._at_once)


def send_buckets(
    flat: Iterable[tuple[Bucket, list[Tensor]]], tensors: Sequence[Tensor], may_be_late: Collection[int]
) -> list[FlatBroadcast]:
    """Sends the tensors of each bucket to its flat buffers. Buckets of those that may be late are left to the caller.

    ``may_be_late`` are positions of tensors; returned are the broadcasts of their buckets, to be launched.
    """
    late = []
    for bucket, buffers in flat:
        if bucket.indices[0] in may_be_late:
            late.append(comm.broadcast_into(buffers, bucket, tensors))
        else:
            comm.broadcast(flatten(bucket, tensors), out=buffers)
    return late


def has_strides(tensor: Tensor) -> bool:
    """True unless it is sparse, nested or of another layout without strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_torch.version_of, tensors)]
    except RuntimeError:  # tensors made in inference mode have no version
        return [0 if tensor.is_inference() else _torch.version_of(tensor) for tensor in tensors]


def _flat_buffer_of(part: Tensor) -> Tensor:
    """The flat buffer that ``part`` is a part of, with its own version counter."""
    storage = part.untyped_storage()
    flat = torch.empty(0, dtype=part.dtype, device=part.device)
    return flat.set_(storage, 0, (storage.nbytes() // part.itemsize,), (1,))


def _are_parts(tensors: Sequence[Tensor], bucket: Bucket, flat: Tensor) -> bool:
    """True if ``flat`` consists of the bucket's tensors, in the bucket's order."""
    if flat.numel() != bucket.numel:
        return False
    parts = unflatten(bucket, flat)
    return all(part.data_ptr() == tensors[i].data_ptr() for i, part in zip(bucket.indices, parts, strict=True))
