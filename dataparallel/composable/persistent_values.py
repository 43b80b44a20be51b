"""What each forward sends to persistent copies: the source's current values, into the memory that the copies have.

Autograd does not notice that values are written. If the source has not changed, the values are the same, and a graph
that still waits for its backward stays valid. If the version of a source's tensor has changed since the last forward,
graphs that used its former value are no longer valid: the versions of its copies are changed too, and the backward of
such a graph raises the error that torch raises on one device. Writes through ``.data`` change no version.

This file makes no copies. Only ``composable.persistent_tensors`` uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.buckets import Bucket, flatten, plan_buckets, unflatten
from dataparallel.comm.transport import FlatBroadcast
from dataparallel.modules.plan import ModulePlan
from dataparallel.profiling import note_copy
from dataparallel.streams.arrivals import Arrivals

__all__ = ["CurrentValues"]


class CurrentValues:
    """Gives copies of a plan's tensors their values.

    Args:
        plan, slots: the source, and where its copies are.
        by_slot: for each slot a copy of each of the plan's tensors, as soon as it is made. The caller fills it in.
    """

    def __init__(self, plan: ModulePlan, slots: list[torch.device], by_slot: list[list[Tensor]]) -> None:
        self._tensors, self._slots, self._by_slot = plan.tensors, slots, by_slot
        self._parameters = set(plan.parameters)
        recorded = (i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad)
        self._at_once = plan.read_directly.union(i for i in recorded if i not in self._parameters)
        # What each forward sends: flat buckets, single tensors, sparse tensors; with the memory that receives it.
        self._flat: list[tuple[Bucket, list[Tensor]]] = []
        self._singles: list[tuple[int, list[Tensor]]] = []
        self._sparse: list[tuple[int, bool]] = []  # true: each slot has its own copy
        self._versions: list[int] = []

    def send_at_each_forward(self, indices: list[int], cap_bytes: int, own: bool) -> None:
        """Has `refresh` fill the memory of copies that were just made, as one buffer if it is in one piece."""
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
        for i in alone:
            self._singles.append((i, [self._by_slot[slot][i].data for slot in slots]))

    def note_versions(self) -> None:
        """The copies were just made from the versions that the source's tensors have now."""
        self._versions = _versions(self._tensors)

    def _slots_with_memory(self, source: torch.device, own: bool) -> list[int]:
        """One slot for each copy that has its own memory. Tensors come from the device ``source``."""
        found: dict[Any, int] = {}
        for slot, device in enumerate(self._slots):
            if slot > 0 and (own or device != source):
                found.setdefault(slot if own else device, slot)
        return list(found.values())

    @torch.no_grad()
    def refresh(self, arrivals: Arrivals | None = None) -> None:
        """Gives the copies current values. ``arrivals``: parameters may still be on their way when this returns."""
        tensors = self._tensors
        late = []
        for bucket, copies in self._flat:
            if arrivals is None or self._are_buffers(bucket.indices):
                comm.broadcast(flatten(bucket, tensors), out=copies)
            else:
                late.append(comm.broadcast_into(copies, bucket, tensors))
        if arrivals is not None:
            self.launch(late, arrivals)
        for i, copies in self._singles:
            for copy in copies:
                note_copy("direct", tensors[i], copy.device)
                copy.copy_(tensors[i])
        for i, own in self._sparse:
            self._replace_sparse(i, own)
        versions = _versions(tensors)
        if versions != self._versions:
            changed = [i for i, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new]
            # Slot 0's copies share the source's versions.
            torch.autograd.graph.increment_version([on_slot[i] for on_slot in self._by_slot[1:] for i in changed])
            self._versions = versions

    def _are_buffers(self, indices: Sequence[int]) -> bool:
        """True for a bucket of buffers that need no gradient."""
        return indices[0] not in self._parameters and not self._tensors[indices[0]].requires_grad

    def launch(self, late: Sequence[FlatBroadcast], arrivals: Arrivals) -> None:
        """Launches the broadcasts of parameters in the order of use."""
        # Buckets with gradients were made in reverse order of their gradients, which is about the order of use.
        # Constant parameters have no gradients and go where they are registered.
        recorded = [broadcast for broadcast in late if self._tensors[broadcast.indices[0]].requires_grad]
        constant = [broadcast for broadcast in late if not self._tensors[broadcast.indices[0]].requires_grad]
        merged = heapq.merge(recorded, constant, key=lambda broadcast: min(broadcast.indices))
        arrivals.launch(merged, self._at_once)

    def _replace_sparse(self, i: int, own: bool) -> None:
        """Gives copies of a sparse tensor its current values, in new memory: a write may replace its indices."""
        source = self._tensors[i]
        sent = comm.broadcast_coalesced([source], self._slots, own_storage=own)
        for on_slot, (values,) in zip(self._by_slot, sent, strict=True):
            if on_slot[i] is not source:
                on_slot[i].data = values


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
