"""The parameters and buffers of persistent replicas: made once, given the source's values at every forward.

This file makes them and decides whether a call can use them again. ``persistent_values`` gives them their values.

Replicas for training can be kept in three ways:

- Parameters that are leaves, with hooks on the accumulation of their gradients. Then ``torch.autograd.grad`` finds no
  path to the source's parameters, the hooks run several times under reentrant checkpoints, and double backward has to
  be refused.
- Kept modules whose parameters are outputs of new nodes at each forward. All promises hold, but each forward makes
  thousands of tensors, which is most of what replicas cost.
- Kept outputs of one broadcast and its nodes (``autograd.bucket_nodes``), as in this file. Every recorded graph has
  these nodes, so all of autograd works as with new ones, and a forward costs one copy for each bucket and device.

Values travel on side streams (``streams.arrivals``) while one thread makes all calls. Calls of several threads share
the copies, and one of them may read them while another one refreshes them: then values travel on the computing streams.
A thread that runs only the backward is not seen: it should not run beside another thread's forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import Tensor

from dataparallel.autograd.bucket_nodes import broadcast_bucket
from dataparallel.comm import settings
from dataparallel.comm.buckets import fill_buckets
from dataparallel.comm.transport import FlatBroadcast, Later
from dataparallel.composable.gradient_sums import GradientSums, PersistentToSlots, WaitingBucket
from dataparallel.composable.persistent_memory import MemoryOfCopies
from dataparallel.composable.persistent_values import CurrentValues
from dataparallel.modules.build import make_parameters
from dataparallel.modules.plan import ModulePlan
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicate import copy_buffers, copy_constants, of_part
from dataparallel.streams.arrivals import Arrivals
from dataparallel.streams.current import current_streams
from dataparallel.streams.gradients import GradientStreams

__all__ = ["PersistentCopies", "PersistentTensors"]


class PersistentTensors:
    """The tensors of one module on all of its slots, for `KeptReplicas`. One thread at a time may use them.

    Args:
        slots: all slots; a call may use only the first few.
        first_bytes, cap_bytes: sizes of the first bucket and of the others.
        broadcast_buffers: if true, buffers get slot 0's values at each forward, else only when they are made.

    Attributes:
        sums: sums gradients, or keeps them on the slots.
        copies: the copies that the next forward uses if it can; ``None`` before the first forward and after `clear`.
    """

    def __init__(self, slots: list[torch.device], first_bytes: int, cap_bytes: int, broadcast_buffers: bool) -> None:
        self.sums = GradientSums()
        self.copies: PersistentCopies | None = None
        self._slots = slots
        self._first_bytes, self._cap_bytes = first_bytes, cap_bytes
        self._broadcast_buffers = broadcast_buffers
        self._order: list[int] | None = None  # positions in the plan as gradients arrived in the first pass
        self._callers: set[int] = set()  # threads

    def __reduce__(self) -> NoReturn:
        raise TypeError("the tensors of persistent replicas belong to one module and cannot be copied")

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """The plan's tensors for each of the first slots, with current values; parameters are `ReplicaParameter`.

        Slot 0's tensors, and parameters of other slots on its device, share the source's memory. The tensors are the
        same if no graph is recorded. ``cap_bytes`` is ignored: the sizes of buckets were given before. ``arrivals``:
        parameters may still be on their way.
        """
        if arrivals is not None and not self._is_called_by_one_thread():
            # The copies of all calls are the same memory, which other threads may read until this one is done.
            arrivals.wait_for_others()
            arrivals = None
        with torch.inference_mode(False):
            # Nothing here holds the former copies while new ones are made, which need their memory.
            if self.copies is None or not self._can_be_used_again(self.copies, plan):
                self.copies = self._make(plan, arrivals)
            else:
                self.sums.drop_void()
                self.copies.values.refresh(arrivals)
            return self.copies.by_slot[: len(slots)]

    def end_call(self) -> None:
        """Does nothing: the next call gives the tensors new values, and undoes changes that ``forward`` made."""

    forget_last_call = end_call

    def clear(self) -> None:
        """Releases all tensors; gradients that wait on slots are added to the source's ``.grad``."""
        self.sums.add_kept()
        self.sums.use([])
        self.copies = None

    def _can_be_used_again(self, copies: PersistentCopies, plan: ModulePlan) -> bool:
        return copies.still_fit(plan, self._slots) and not self._learn_order(copies) and copies.memory.restore()

    def _is_called_by_one_thread(self) -> bool:
        """True if one thread has made all calls so far."""
        self._callers.add(threading.get_ident())
        return len(self._callers) == 1

    def _make(self, plan: ModulePlan, arrivals: Arrivals | None) -> PersistentCopies:
        same_tree = self.copies is not None and self.copies.are_of(plan)
        self.clear()
        if not same_tree:
            self._order = None
        copies = PersistentCopies(plan, self._slots, self._broadcast_buffers)
        # Before the order is known each parameter is a bucket, for one pass, so that each has a time of arrival.
        first, cap = (1, 1) if self._order is None else (self._first_bytes, self._cap_bytes)
        with torch.enable_grad():
            copies.make(first, cap, self._order, self.sums, arrivals)
        return copies

    def _learn_order(self, copies: PersistentCopies) -> bool:
        """After the first pass: sets the order of buckets to that in which gradients arrived, and returns ``True``."""
        if self._order is not None or not copies.gradient_order:
            return False
        arrived = [copies.buckets[position][0] for position in dict.fromkeys(copies.gradient_order)]
        known = {*arrived}
        self._order = [*arrived, *(i for i in reversed(copies.recorded) if i not in known)]
        return True


class PersistentCopies:
    """Copies that were made together, with the state of the source and of the caller at that time.

    Attributes:
        by_slot: for each slot a copy of each of the plan's tensors.
        recorded: positions in the plan of tensors that need gradients.
        buckets: the same positions, in buckets.
        gradient_order: positions in ``buckets`` in the order in which their gradients arrived, while that is not known.
        values: gives the copies the source's values at each forward.
        memory: the memory of the copies.
    """

    def __init__(self, plan: ModulePlan, slots: list[torch.device], broadcast_buffers: bool) -> None:
        self.plan, self.slots = plan, slots
        self._broadcast_buffers = broadcast_buffers
        self.by_slot: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
        self.recorded = [i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad]
        self.buckets: list[list[int]] = []
        self.gradient_order: list[int] = []
        self._kinds = _kinds(plan.tensors)
        self._streams = current_streams(slots)
        self._settings = settings.current()
        self._parameters = set(plan.parameters)
        self.values = CurrentValues(plan, slots, self.by_slot, self._settings.isolated)

    def are_of(self, plan: ModulePlan) -> bool:
        """True if ``plan`` has the same tensors and the same of them need gradients."""
        return (
            len(plan.tensors) == len(self.plan.tensors)
            and all(map(is_, plan.tensors, self.plan.tensors))
            and plan.parameters == self.plan.parameters
            and [i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad] == self.recorded
        )

    def still_fit(self, plan: ModulePlan, slots: list[torch.device]) -> bool:
        """True if copies that were made now would differ from these in value only, and be waited for alike."""
        return (
            slots == self.slots
            and self.are_of(plan)
            and _kinds(plan.tensors) == self._kinds
            and plan.read_directly == self.plan.read_directly
            and current_streams(slots) == self._streams
            and settings.current() == self._settings
        )

    def make(
        self,
        first_bytes: int,
        cap_bytes: int,
        order: Sequence[int] | None,
        sums: GradientSums,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Fills `by_slot`; ``order`` is that of the gradients, if it is known.

        ``arrivals``: as for `CurrentValues.refresh`.
        """
        tensors = self.plan.tensors
        self.buckets = fill_buckets(tensors, order or self.recorded[::-1], first_bytes, cap_bytes)
        late: list[FlatBroadcast] = []
        later = None if arrivals is None else late.append
        self._make_recorded(order is not None, sums, later)
        recorded = {*self.recorded}
        constant = [i for i in self.plan.parameters if i not in recorded]
        buffers = [i for i in range(len(tensors)) if i not in recorded and i not in self._parameters]
        copy_constants(self.by_slot, self.plan, constant, self.slots, cap_bytes, later)
        self.values.send_at_each_forward(constant, cap_bytes, False)
        copy_buffers(self.by_slot, self.plan, buffers, self.slots, cap_bytes)
        if self._broadcast_buffers:
            self.values.send_at_each_forward(buffers, cap_bytes, True)
        if arrivals is not None:
            self.values.launch(late, arrivals)
        for on_slot in self.by_slot:
            make_parameters(self.plan, on_slot, ReplicaParameter)
        self.values.note_versions()
        # Slot 0's buffers are the source's. Buffers that are not sent keep what forward writes to them.
        not_sent = {*buffers} if not self._broadcast_buffers else ()
        self.memory = MemoryOfCopies(
            [
                copy
                for on_slot in self.by_slot
                for i, (copy, tensor) in enumerate(zip(on_slot, tensors, strict=True))
                if copy is not tensor and i not in not_sent and _has_strides(tensor)
            ]
        )

    def _make_recorded(self, order_is_known: bool, sums: GradientSums, later: Later | None) -> None:
        """Makes the copies of tensors that need gradients, bucket by bucket."""
        gradient_streams = GradientStreams.for_forward(self.slots, self._streams)
        buckets: list[WaitingBucket] = []
        token = first_token = torch.empty(0, requires_grad=True)
        for position, group in reversed([*enumerate(self.buckets)]):
            waiting = WaitingBucket(sums, [self.plan.tensors[i] for i in group], self._streams)
            # Arrival is noted on the slots: if the root's thread is late, it has a choice of many buckets.
            note = None if order_is_known else partial(self.gradient_order.append, position)
            streams = None if gradient_streams is None else gradient_streams.of_bucket(position)
            token = self._make_bucket(group, waiting, streams, token, note, of_part(group, later))
            buckets.append(waiting)
            if not order_is_known:  # the tokens would impose one
                token = first_token
        sums.use(buckets)

    def _make_bucket(
        self,
        group: list[int],
        waiting: WaitingBucket,
        gradient_streams: GradientStreams | None,
        token: Tensor,
        note: Callable[[], None] | None,
        later: Later | None,
    ) -> Tensor:
        """Makes a bucket's copies. Returns the token for the bucket that is to be summed before this one.

        ``note`` is called when a slot has all of its gradients.
        """

        def to_slots(*arguments: Any) -> Sequence[Tensor]:
            nonlocal token
            *handles, token = PersistentToSlots.apply(*arguments, token)
            token.grad_fn.waiting = waiting  # type: ignore[union-attr]
            return handles

        tensors = [self.plan.tensors[i] for i in group]
        outputs = broadcast_bucket(
            self.slots, tensors, gradient_streams, to_slots, lambda: waiting.sums.are_on, note, later
        )
        for on_slot, of_slot in zip(self.by_slot, outputs, strict=True):
            for i, output in zip(group, of_slot, strict=True):
                on_slot[i] = output
        self.values.send_at_each_forward(group, 2**62, False)
        return token


_KIND = attrgetter("shape", "dtype", "device")


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """All that copies depend on except values. ``.data =`` may change it without making another tensor."""
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
