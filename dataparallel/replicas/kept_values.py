"""For copies that stay: `CurrentValues` sends the source's values to their memory at each forward."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm.buckets import Bucket, flatten, plan_buckets, unflatten
from dataparallel.comm.kinds import alias, copy_values, give_attributes
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.transport import FlatBroadcast


class CurrentValues:
    """Sends the source's values to copies at each forward.

    Autograd does not notice the writes. If the source has not changed, the values are the same, and a graph that waits
    for its backward stays valid. If the version of a source's tensor has changed since the last forward, the graph has
    used another value. So the versions of the copies are changed too, and the graph's backward raises the error that
    torch raises on one device. Writes through ``.data`` change no version.

    ``by_slot``: for each slot a copy of each of the tensors. The caller fills the lists later.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        slots: list[torch.device],
        by_slot: list[list[Tensor]],
        parameters: Sequence[int] = (),
        read_directly: AbstractSet[int] = frozenset(),
    ) -> None:
        self._tensors, self._slots, self._by_slot = tensors, slots, by_slot
        recorded = {i for i, tensor in enumerate(tensors) if tensor.requires_grad}
        self._may_be_late = recorded.union(parameters)
        self._needed_first = read_directly | recorded.difference(parameters)
        # Each forward sends:
        self._buckets: list[tuple[Bucket, list[Tensor]]] = []  # buckets, each with the flat buffers of its copies
        self._singles: list[tuple[int, list[Tensor]]] = []  # single tensors, with their copies' memory
        # The attributes that copies have been given, by the tensor's position, if these have no tensors of their own.
        self._given: dict[int, list[Any]] = {}
        self._versions: list[int] = []
        self._parameters = parameters
        self._backward = -1  # the number of the backward in which values were last sent; -1: in no backward

    def send_at_each_forward(self, indices: list[int], cap_bytes: int, own: bool) -> None:
        """`refresh` will fill the memory of these copies, as one buffer if their memory is in one piece.

        ``own``: each slot has its own copies. Otherwise slots on one device share them.
        """
        # Those whose copies have memory of their own. The first slot has the source's.
        slots = [slot for slot, device in enumerate(self._slots) if slot and (own or self._slots.index(device) == slot)]
        if not slots:
            return
        buckets, singles = plan_buckets([self._tensors[i] for i in indices], cap_bytes)
        single_indices = [indices[k] for k in singles]
        for planned in buckets:
            members = [indices[k] for k in planned.indices]
            bucket = Bucket.of(list(zip(members, planned.layouts, strict=True)))
            flats = [_flat_buffer_of(self._by_slot[slot][members[0]]) for slot in slots]
            if all(_consists_of(flat, self._by_slot[slot], bucket) for slot, flat in zip(slots, flats, strict=True)):
                self._buckets.append((bucket, flats))
            else:  # the transport that made the copies has ordered them in another way
                single_indices += members
        self._singles += [(i, [alias(self._by_slot[slot][i], slot) for slot in slots]) for i in single_indices]

    def note_versions(self) -> None:
        """Notes that the copies were just made from the current versions of the source's tensors."""
        self._versions, self._backward = _versions(self._tensors), _torch.current_graph_task_id()

    @torch.no_grad()
    def refresh(self, arrivals: Arrivals | None = None) -> None:
        """Gives the copies current values. ``arrivals``: parameters may arrive after this returns.

        Checkpoints run forwards inside a backward. A second one in the same backward sends no unchanged parameter
        again: threads of other devices still compute gradients from its copies, and nothing orders them with a write.
        """
        tensors, versions = self._tensors, _versions(self._tensors)
        backward = _torch.current_graph_task_id()
        is_second = backward == self._backward != -1
        sent = {i for i in self._parameters if versions[i] == self._versions[i]} if is_second else set()
        late = []
        for bucket, buffers in self._buckets:
            if sent.issuperset(bucket.indices):
                continue
            if arrivals is not None and bucket.indices[0] in self._may_be_late:
                send = partial(comm.broadcast, out=buffers)
                late.append(FlatBroadcast(bucket.indices, bucket, tensors, send, buffers))
            else:
                comm.broadcast(flatten(bucket, tensors), out=buffers)
        if arrivals is not None:
            self.launch(late, arrivals)
        for i, copies in [each for each in self._singles if each[0] not in sent]:
            for copy in copies:
                copy_values(copy, tensors[i])
        self._give_attributes()
        if versions != self._versions:
            changed = [i for i, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new]
            # Slot 0's copies share the source's versions.
            torch.autograd.graph.increment_version([on_slot[i] for on_slot in self._by_slot[1:] for i in changed])
            self._versions = versions
        self._backward = backward

    def _give_attributes(self) -> None:
        for i, attributes in enumerate(map(vars, self._tensors)):
            if not attributes:
                continue
            values, given = [*attributes.values()], self._given.get(i)
            if given is None or len(values) != len(given) or not all(map(is_, values, given)):
                source = self._tensors[i]
                copies = [on_slot[i] for on_slot in self._by_slot if on_slot[i] is not source]
                if not any([give_attributes(copy, source) for copy in copies]):
                    self._given[i] = values

    def launch(self, late: Sequence[FlatBroadcast], arrivals: Arrivals) -> None:
        """Launches the broadcasts of parameters in the order of use."""
        # The order of use is about the reverse order of gradients, in which the buckets with gradients were made.
        # Constant parameters have no gradients. They are merged in the order in which parameters are registered.
        recorded = [broadcast for broadcast in late if self._tensors[broadcast.indices[0]].requires_grad]
        constant = [broadcast for broadcast in late if not self._tensors[broadcast.indices[0]].requires_grad]
        merged = heapq.merge(recorded, constant, key=lambda broadcast: min(broadcast.indices))
        arrivals.launch(merged, self._needed_first)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_torch.version_of, tensors)]
    except RuntimeError:  # tensors made in inference mode have no version
        return [0 if tensor.is_inference() else _torch.version_of(tensor) for tensor in tensors]


def _flat_buffer_of(tensor: Tensor) -> Tensor:
    """Returns a flat view of the tensor's whole storage. The view has its own version counter."""
    return tensor.data.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _consists_of(flat: Tensor, tensors: Sequence[Tensor], bucket: Bucket) -> bool:
    """True if ``flat`` consists of the bucket's ``tensors``, in the bucket's order."""
    if flat.numel() != bucket.numel:
        return False
    views = unflatten(bucket, flat)
    return all(view.data_ptr() == tensors[i].data_ptr() for i, view in zip(bucket.indices, views, strict=True))
