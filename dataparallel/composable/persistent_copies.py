"""The copies of a module's parameters and buffers that persistent replicas have, and the nodes of their gradients.

``composable.persistent_tensors`` says why copies are kept, and when they can be used again. Only it makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.bucket_nodes import broadcast_bucket
from dataparallel.autograd.gradient_streams import GradientStreams
from dataparallel.comm import settings
from dataparallel.comm.buckets import fill_buckets
from dataparallel.comm.transport import FlatBroadcast, Later
from dataparallel.composable.after_slots import ChainedBucket
from dataparallel.composable.bucket_order import BucketOrder, recorded_in
from dataparallel.composable.exchange_nodes import Passes, PersistentToSlots, make_sources, make_to_slots
from dataparallel.composable.exchanges import Chain
from dataparallel.composable.gradient_sums import GradientSums, WaitingBucket
from dataparallel.composable.persistent_values import CurrentValues
from dataparallel.modules.build import make_parameters
from dataparallel.modules.plan import ModulePlan, names_of
from dataparallel.replica_memory import MemoryOfCopies
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicate import copy_buffers, copy_constants, of_part
from dataparallel.streams.arrivals import Arrivals
from dataparallel.streams.current import current_streams

__all__ = ["PersistentCopies"]


class PersistentCopies:
    """Copies that were made together, with the state of the source and of the caller at that time.

    Attributes:
        by_slot: for each slot a copy of each of the plan's tensors.
        recorded: positions in the plan of tensors that need gradients.
        buckets: the same positions, in buckets.
        order: the order of the buckets, if it was known.
        learns_order: true if a pass through these copies shows the order. The maker sets it.
        values: gives the copies the source's values at each forward.
        memory: the memory of the copies.
    """

    def __init__(self, plan: ModulePlan, slots: list[torch.device], broadcast_buffers: bool) -> None:
        self.plan, self.slots = plan, slots
        self._broadcast_buffers = broadcast_buffers
        self.by_slot: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
        self.recorded = recorded_in(plan)
        self.buckets: list[list[int]] = []
        self.order: list[int] | None = None
        self.learns_order = False
        self._kinds = _kinds(plan.tensors)
        self._thread = threading.get_ident()
        self._streams = current_streams(slots)
        self._settings = settings.current()
        self._parameters = set(plan.parameters)
        self.values = CurrentValues(plan, slots, self.by_slot)

    def are_of(self, plan: ModulePlan) -> bool:
        """True if ``plan`` has the same tensors and the same of them need gradients."""
        return (
            len(plan.tensors) == len(self.plan.tensors)
            and all(map(is_, plan.tensors, self.plan.tensors))
            and plan.parameters == self.plan.parameters
            and recorded_in(plan) == self.recorded
        )

    def still_fit(self, plan: ModulePlan, slots: list[torch.device]) -> bool:
        """True if copies that were made now would differ from these in value only, and be waited for alike.

        And the thread is the one that has made them: others may read them while this one writes new values.
        """
        return (
            threading.get_ident() == self._thread
            and slots == self.slots
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
        order: BucketOrder,
        sums: GradientSums,
        passes: Passes | None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Fills `by_slot`, with buckets in the order of the gradients.

        ``arrivals``: as for `CurrentValues.refresh`.
        """
        tensors = self.plan.tensors
        self.order = order.known
        self.buckets = fill_buckets(tensors, order.known or self.recorded[::-1], first_bytes, cap_bytes)
        late: list[FlatBroadcast] = []
        later = None if arrivals is None else late.append
        self._make_recorded(order, sums, passes, later)
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

    def _make_recorded(
        self, order: BucketOrder, sums: GradientSums, passes: Passes | None, later: Later | None
    ) -> None:
        """Makes the copies of tensors that need gradients, bucket by bucket."""
        gradient_streams = GradientStreams.for_forward(self.slots, self._streams)
        chain = None
        handles: Sequence[Tensor | None] = [None] * len(self.buckets)
        token = first_token = torch.empty(0, requires_grad=True)
        sources = [[self.plan.tensors[i] for i in group] for group in self.buckets]
        waiting = [WaitingBucket(sums, of_bucket, self._streams) for of_bucket in sources]
        if passes is not None and waiting:
            chain = self._chain(passes, waiting, order)
            handles, token = make_sources(chain)
        for position, group in reversed([*enumerate(self.buckets)]):
            # Arrival is noted on the slots: if the root's thread is late, it has a choice of many buckets.
            note = None if order.known is not None else partial(order.arrived.append, group[0])
            streams = None if gradient_streams is None else gradient_streams.of_bucket(position)
            maker = _BucketMaker(waiting[position], token, chain, position)
            outputs = broadcast_bucket(
                self.slots,
                sources[position],
                streams,
                maker.to_slots,
                lambda: sums.are_on,
                note,
                of_part(group, later),
                handles[position],
            )
            token = maker.token
            if order.known is None and chain is None:  # the tokens would impose an order
                token = first_token
            for on_slot, of_slot in zip(self.by_slot, outputs, strict=True):
                for i, output in zip(group, of_slot, strict=True):
                    on_slot[i] = output
            if chain is not None:
                chain.note_copies(position, outputs)
            self.values.send_at_each_forward(group, 2**62, False)
        sums.use(waiting[::-1])

    def _chain(self, passes: Passes, waiting: Sequence[Any], order: BucketOrder) -> Chain:
        names = names_of(self.plan)
        chained = [
            ChainedBucket(of_bucket, [names[i] for i in group])
            for of_bucket, group in zip(waiting, self.buckets, strict=True)
        ]
        return Chain(passes, chained, self._streams, order.note_pass)


class _BucketMaker:
    """Applies the node that sums a bucket. ``token``: before, that of the next bucket; then the one of this bucket."""

    def __init__(self, waiting: WaitingBucket, token: Tensor, chain: Chain | None, position: int) -> None:
        self._waiting, self.token, self._chain, self._position = waiting, token, chain, position

    def to_slots(self, *arguments: Any) -> Sequence[Tensor]:
        """As `ToSlots.apply`."""
        if self._chain is not None:
            *handles, self.token = make_to_slots(self._chain, self._position, self.token)(*arguments)
        else:
            *handles, self.token = PersistentToSlots.apply(*arguments, self.token)
            self.token.grad_fn.waiting = self._waiting  # type: ignore[union-attr]
        return handles


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
