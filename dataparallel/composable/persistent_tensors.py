"""The parameters and buffers of replicas that stay: made once, given the source's values at every forward.

There are three ways to keep replicas for training. Leaf parameters with hooks on their accumulation: then
``torch.autograd.grad`` for the source's parameters finds no way to them, the hooks fire several times under reentrant
checkpoints, and double backward has to be refused. Outputs of new nodes at each forward, in modules that are kept: all
promises hold, but thousands of tensors are made each time, which is most of what replicas cost. This room keeps the
outputs of one broadcast and its nodes (``autograd.bucket_nodes``): they are part of every graph that is recorded, so
that all of autograd works as with new ones, and a forward costs one copy for each bucket and device.

Values are written below autograd's sight: a graph that still waits for its backward stays valid, since what is written
is what was there. Where the source's tensor has been changed since the last forward (its version says so; writes
through ``.data`` leave no trace), graphs that used the former values must not go on: then versions of the copies move
too, and such a backward raises the error that torch raises on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_nodes import broadcast_bucket
from dataparallel.comm import settings
from dataparallel.comm.buckets import Bucket, fill_buckets, flatten, plan_buckets, unflatten
from dataparallel.comm.copies import alias
from dataparallel.composable.gradient_sums import GradientSums, PersistentToSlots, WaitingBucket
from dataparallel.composable.persistent_memory import MemoryOfCopies
from dataparallel.modules.build import make_parameters
from dataparallel.modules.plan import ModulePlan
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.streams.current import current_streams
from dataparallel.streams.gradients import GradientStreams

__all__ = ["PersistentTensors"]


class PersistentTensors:
    """The tensors of one module on all of its slots, for `KeptReplicas`. For one thread at a time.

    Args:
        slots: of which a call may use the first few.
        first_bytes, cap_bytes: sizes of the first bucket and of the others.
        broadcast_buffers: whether buffers get slot 0's values at each forward, or only when they are made.

    Attributes:
        sums: how gradients are summed.
    """

    def __init__(self, slots: list[torch.device], first_bytes: int, cap_bytes: int, broadcast_buffers: bool) -> None:
        self.sums = GradientSums()
        self._slots = slots
        self._first_bytes, self._cap_bytes = first_bytes, cap_bytes
        self._broadcast_buffers = broadcast_buffers
        self._made: _Made | None = None
        self._order: list[int] | None = None  # in which gradients arrived in a first pass, by positions in the plan

    def __reduce__(self) -> NoReturn:
        raise TypeError("the tensors of replicas that stay belong to one module and cannot be copied")

    def for_call(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, record: bool) -> list[list[Tensor]]:
        """The plan's tensors for each of the first slots, with the values of now; parameters are `ReplicaParameter`.

        Slot 0's, and parameters of other slots on its device, share the source's memory. They are the same whether a
        graph is recorded or not, and travel in buckets of the sizes that were given before.
        """
        with torch.inference_mode(False):
            # Nothing here holds the former copies while new ones are made: their memory is needed for these.
            if self._made is None or not self._can_stay(self._made, plan):
                self._made = self._make(plan)
            else:
                self.sums.drop_what_is_void()
                self._made.refresh()
            return self._made.copies[: len(slots)]

    def end_call(self) -> None:
        """They stay as they are: the next call gives them values, and takes back what `forward` has done to them."""

    forget_last_call = end_call

    def clear(self) -> None:
        """Lets go of all tensors; gradients that wait on slots go where they belong."""
        self.sums.add_what_is_kept()
        self.sums.use([])
        self._made = None

    def _can_stay(self, made: _Made, plan: ModulePlan) -> bool:
        """Whether the copies can be given the values of now."""
        return made.still_fits(plan, self._slots) and not self._learn_order(made) and made.memory.put_back()

    def _make(self, plan: ModulePlan) -> _Made:
        same_tree = self._made is not None and self._made.is_of(plan)
        self.clear()
        if not same_tree:
            self._order = None
        made = _Made(plan, self._slots, self._broadcast_buffers)
        # Without an order each parameter is a bucket, for one pass, so that each has a time of arrival.
        first, cap = (1, 1) if self._order is None else (self._first_bytes, self._cap_bytes)
        with torch.enable_grad():
            made.make(first, cap, self._order, self.sums)
        return made

    def _learn_order(self, made: _Made) -> bool:
        """After a first pass: buckets are to follow the order in which gradients arrived."""
        if self._order is not None or not made.arrivals:
            return False
        arrived = [made.recorded_groups[position][0] for position in dict.fromkeys(made.arrivals)]
        known = {*arrived}
        self._order = [*arrived, *(i for i in reversed(made.recorded) if i not in known)]
        return True


class _Made:
    """Copies that were made at one time, and what they were made of."""

    def __init__(self, plan: ModulePlan, slots: list[torch.device], broadcast_buffers: bool) -> None:
        self.plan, self.slots = plan, slots
        self._broadcast_buffers = broadcast_buffers
        self.copies: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
        self.recorded = [i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad]
        self.recorded_groups: list[list[int]] = []
        self.arrivals: list[int] = []
        self._kinds = _kinds(plan.tensors)
        self._streams = current_streams(slots)
        self._settings = settings.current()
        self._parameters = set(plan.parameters)
        # What is sent at each forward, with the memory that is filled from it.
        self._flat: list[tuple[Bucket, list[Tensor]]] = []
        self._singles: list[tuple[int, list[Tensor]]] = []
        self._sparse: list[tuple[int, bool]] = []  # and whether slots have their own
        self._versions: list[int] = []

    def is_of(self, plan: ModulePlan) -> bool:
        """Whether ``plan`` has the same tensors, with the same need of gradients."""
        return (
            len(plan.tensors) == len(self.plan.tensors)
            and all(map(is_, plan.tensors, self.plan.tensors))
            and plan.parameters == self.plan.parameters
            and [i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad] == self.recorded
        )

    def still_fits(self, plan: ModulePlan, slots: list[torch.device]) -> bool:
        """Whether copies made now would be the same but in value."""
        return (
            slots == self.slots
            and self.is_of(plan)
            and _kinds(plan.tensors) == self._kinds
            and current_streams(slots) == self._streams
            and settings.current() == self._settings
        )

    def make(self, first_bytes: int, cap_bytes: int, order: Sequence[int] | None, sums: GradientSums) -> None:
        """Fills `copies`."""
        tensors = self.plan.tensors
        self.recorded_groups = fill_buckets(tensors, order or self.recorded[::-1], first_bytes, cap_bytes)
        gradient_streams = GradientStreams.for_forward(self.slots, self._streams)
        buckets: list[WaitingBucket] = []
        token = first_token = torch.empty(0, requires_grad=True)
        for position, group in reversed([*enumerate(self.recorded_groups)]):
            waiting = WaitingBucket(sums, [tensors[i] for i in group], self._streams)
            # Noted on the slots: where the root's thread comes late, many buckets wait for it, and it takes any.
            note = partial(self.arrivals.append, position) if order is None else None
            token = self._make_recorded(group, waiting, gradient_streams, token, note)
            buckets.append(waiting)
            if order is None:  # to be learnt, so none is to be kept
                token = first_token
        sums.use(buckets)
        recorded = {*self.recorded}
        constant = [i for i in self.plan.parameters if i not in recorded]
        buffers = [i for i in range(len(tensors)) if i not in recorded and i not in self._parameters]
        for indices, own in ((constant, False), (buffers, True)):
            sent = comm.broadcast_coalesced([tensors[i] for i in indices], self.slots, cap_bytes, own_storage=own)
            for slot, on_slot in enumerate(sent):
                for i, tensor in zip(indices, on_slot, strict=True):
                    self.copies[slot][i] = tensor if own else alias(tensor, slot)
            if self._broadcast_buffers or not own:
                self._note(indices, cap_bytes, own)
        for on_slot in self.copies:
            make_parameters(self.plan, on_slot, ReplicaParameter)
        self._versions = _versions(tensors)
        # Slot 0's buffers are the source's; others that are not sent keep what forward makes of them.
        kept = {*buffers} if not self._broadcast_buffers else ()
        self.memory = MemoryOfCopies(
            [
                copy
                for on_slot in self.copies
                for i, (copy, tensor) in enumerate(zip(on_slot, tensors, strict=True))
                if copy is not tensor and i not in kept and _has_strides(tensor)
            ]
        )

    def _make_recorded(
        self,
        group: list[int],
        waiting: WaitingBucket,
        gradient_streams: GradientStreams | None,
        token: Tensor,
        note: Callable[[], None] | None,
    ) -> Tensor:
        """Puts a bucket's copies into `copies`; the token for the bucket that is to be summed before this one.

        ``note`` is called when a slot has all of its gradients.
        """

        token_of_this: list[Tensor] = []

        def to_slots(
            slots: Sequence[torch.device], gradient_streams: GradientStreams | None, handle: Tensor
        ) -> Sequence[Tensor]:
            *handles, next_token = PersistentToSlots.apply(slots, gradient_streams, handle, token)
            next_token.grad_fn.waiting = waiting
            token_of_this.append(next_token)
            return handles

        tensors = [self.plan.tensors[i] for i in group]
        outputs = broadcast_bucket(self.slots, tensors, gradient_streams, to_slots, lambda: waiting.sums.are_on, note)
        for on_slot, of_slot in zip(self.copies, outputs, strict=True):
            for i, output in zip(group, of_slot, strict=True):
                on_slot[i] = output
        self._note(group, 2**62, False)
        return token_of_this[0]

    def _note(self, indices: list[int], cap_bytes: int, own: bool) -> None:
        """Notes the memory of copies that were just made, to be filled again as one where it is in one piece."""
        sparse = [i for i in indices if self.plan.tensors[i].layout not in (torch.strided, torch.jagged)]
        self._sparse += [(i, own) for i in sparse]
        indices = [i for i in indices if i not in sparse]
        slots = self._slots_with_memory(self.plan.tensors[indices[0]].device, own) if indices else []
        if not slots:
            return
        buckets, singles = plan_buckets([self.plan.tensors[i] for i in indices], cap_bytes)
        alone = [indices[k] for k in singles]
        for planned in buckets:
            members = [indices[k] for k in planned.indices]
            bucket = Bucket.of(list(zip(members, planned.layouts, strict=True)))
            whole = [_whole(self.copies[slot][members[0]]) for slot in slots]
            if all(_lies_in(memory, bucket, self.copies[slot]) for slot, memory in zip(slots, whole, strict=True)):
                self._flat.append((bucket, whole))
            else:  # made by a transport that has an order of its own
                alone += members
        for i in alone:
            self._singles.append((i, [self.copies[slot][i].data for slot in slots]))

    def _slots_with_memory(self, source: torch.device, own: bool) -> list[int]:
        """A slot for each copy that has memory of its own, where tensors come from ``source``."""
        own = own or self._settings.isolated
        found: dict[Any, int] = {}
        for slot, device in enumerate(self.slots):
            if slot > 0 and (own or device != source):
                found.setdefault(slot if own else device, slot)
        return list(found.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Gives the copies the values of now."""
        tensors = self.plan.tensors
        for bucket, copies in self._flat:
            comm.broadcast(flatten(bucket, tensors), out=copies)
        for i, copies in self._singles:
            for copy in copies:
                copy.copy_(tensors[i])
        for i, own in self._sparse:
            self._replace_sparse(i, own)
        versions = _versions(tensors)
        if versions != self._versions:
            changed = [i for i, (old, new) in enumerate(zip(self._versions, versions, strict=True)) if old != new]
            # Slot 0's share the source's versions.
            torch.autograd.graph.increment_version([on_slot[i] for on_slot in self.copies[1:] for i in changed])
            self._versions = versions

    def _replace_sparse(self, i: int, own: bool) -> None:
        """Gives copies of a sparse tensor its values of now: what writes to one may put other parts into it."""
        source = self.plan.tensors[i]
        sent = comm.broadcast_coalesced([source], self.slots, own_storage=own)
        for on_slot, (values,) in zip(self.copies, sent, strict=True):
            if on_slot[i] is not source:
                on_slot[i].data = values


_KIND = attrgetter("shape", "dtype", "device")


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """What copies of tensors depend on, but for values; ``.data =`` may change it in the same tensor."""
    dense = [tensor for tensor in tensors if _has_strides(tensor)]
    return [
        len(dense),
        *map(type, tensors),
        *map(_KIND, tensors),
        *map(Tensor.stride, dense),
        *map(Tensor.data_ptr, dense),
    ]


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_torch.version_of, tensors)]
    except RuntimeError:  # tensors made in inference mode have none
        return [0 if tensor.is_inference() else _torch.version_of(tensor) for tensor in tensors]


def _whole(part: Tensor) -> Tensor:
    """The flat buffer that a part lies in, with a version counter of its own."""
    storage = part.untyped_storage()
    flat = torch.empty(0, dtype=part.dtype, device=part.device)
    return flat.set_(storage, 0, (storage.nbytes() // part.itemsize,), (1,))


def _lies_in(flat: Tensor, bucket: Bucket, tensors: Sequence[Tensor]) -> bool:
    """Whether the bucket's tensors are the parts of ``flat``, in the bucket's order."""
    if flat.numel() != sum(layout.numel for layout in bucket.layouts):
        return False
    parts = unflatten(bucket, flat)
    return all(part.data_ptr() == tensors[i].data_ptr() for i, part in zip(bucket.indices, parts, strict=True))
