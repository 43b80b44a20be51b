"""The parameters and buffers of persistent replicas: made once, given the source's values at every forward.

They are outputs of one broadcast, kept with its nodes, so all of autograd works as with new ones. Leaf parameters would
not do: ``torch.autograd.grad`` finds no path through them to the source, and hooks on them run several times.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import GradientStreams
from dataparallel.autograd.bucket_nodes import broadcast_bucket
from dataparallel.comm import settings
from dataparallel.comm.buckets import fill_buckets
from dataparallel.comm.streams.arrivals import Arrivals
from dataparallel.comm.streams.current import current_streams
from dataparallel.comm.transport import FlatBroadcast, Later
from dataparallel.gradients.after_slots import AfterSlots, ChainedBucket
from dataparallel.gradients.bucket_order import BucketOrder, recorded_in
from dataparallel.gradients.exchange_nodes import Passes, make_sources, make_to_slots
from dataparallel.gradients.exchanged_sums import ExchangedBucket, ExchangedSums
from dataparallel.gradients.exchanges import Chain
from dataparallel.gradients.gradient_sums import GradientSums, PersistentToSlots, WaitingBucket
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.build import make_parameters
from dataparallel.replicas.kept_tensors import ReplicaTensors
from dataparallel.replicas.kept_values import CurrentValues, MemoryOfCopies, has_strides
from dataparallel.replicas.plan import ModulePlan, names_of
from dataparallel.replicas.replicate import at_positions, copy_buffers, copy_constants, put

if TYPE_CHECKING:
    from dataparallel.gradients.machine_sums import Agreement


class PersistentTensors(ReplicaTensors):
    """The tensors of one module on all of its slots. One thread at a time may use them.

    Copies belong to the thread whose call has made them. A call of another thread makes new ones: it would write to
    memory that the first thread may read just then, and nothing orders the two. A thread that runs only the backward is
    not seen: it should not run beside another thread's forward.

    Args:
        slots: all slots; a call may use only the first few.
        first_bytes, cap_bytes: sizes of the first bucket and of the others.
        broadcast_buffers: if true, buffers get slot 0's values at each forward, else only when they are made.

    Attributes:
        sums: sums gradients, or keeps them on the slots.
        passes: the passes whose sums go on after the slots, if they do.
        copies: the copies that the next forward uses if it can; ``None`` before the first forward and after `clear`.
    """

    def __init__(self, slots: list[torch.device], first_bytes: int, cap_bytes: int, broadcast_buffers: bool) -> None:
        self.sums = GradientSums()
        self.passes: Passes | None = None
        self._agreement: Agreement | None = None
        self.copies: _PersistentCopies | None = None
        self._slots = slots
        self._first_bytes, self._cap_bytes = first_bytes, cap_bytes
        self._broadcast_buffers = broadcast_buffers
        self._order = BucketOrder(None)

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
        """See `ReplicaTensors.for_call`. Parameters are `ReplicaParameter`, also if no graph is recorded.

        Slot 0's tensors, and parameters of other slots on its device, share the source's memory. ``cap_bytes`` is
        ignored: the sizes of buckets were given before.
        """
        with torch.inference_mode(False):
            if record and self._agreement is not None:
                self._agree(self._agreement, plan)
            # Nothing here holds the former copies while new ones are made, which need their memory.
            if self.copies is None or not self._can_be_used_again(self.copies, plan, record):
                self.copies = self._make(plan, record, arrivals)
            else:
                self.sums.drop_void()
                self.copies.values.refresh(arrivals)
            return self.copies.by_slot[: len(slots)]

    def clear(self) -> None:
        """Drops all tensors; gradients that wait on slots are added to the source's ``.grad``."""
        self.sums.add_kept()
        self.sums.use([])
        self.copies = None

    def take_further(self, after: AfterSlots) -> None:
        """From the next backward on, ``after`` follows the sums over the slots.

        Called between steps: a forward that still waits for its backward may not know of it.
        """
        if self.passes is not None:
            self.passes.after = after
            return
        self.clear()
        are_on, self.sums, self.passes = self.sums.are_on, ExchangedSums(), Passes(after)
        self.sums.are_on = are_on

    def agree_by(self, agreement: Agreement, after: AfterSlots) -> None:
        """From now on there are several machines: recorded forwards begin with ``agreement``. As `take_further`."""
        self.take_further(after)
        self._agreement = agreement

    def _can_be_used_again(self, copies: _PersistentCopies, plan: ModulePlan, record: bool) -> bool:
        if record and self._order.known is None and not copies.learns_order:
            return False
        if self._agreement is None:
            # First: calls of several threads take turns in making copies, and would never learn the order.
            has_order = not self._order.learn(copies.order)
        else:  # a forward without grad mode may run on one machine alone, so it decides nothing
            has_order = copies.order is self._order.known or not record
        return has_order and copies.still_fit(plan, self._slots) and copies.memory.restore()

    def _agree(self, agreement: Agreement, plan: ModulePlan) -> None:
        """What a recorded forward does together with the other machines."""
        if self._broadcast_buffers:
            names, parameters = names_of(plan), {*plan.parameters}
            buffers = {names[i]: tensor for i, tensor in enumerate(plan.tensors) if i not in parameters}
            agreement.send_buffers({name: tensor for name, tensor in buffers.items() if not tensor.requires_grad})
        if not self._order.is_of(plan):
            self._order = BucketOrder(plan)
        elif self._order.is_due and self._order.known is None:
            self._order.known = agreement.order(self._order.found())

    def _make(self, plan: ModulePlan, record: bool, arrivals: Arrivals | None) -> _PersistentCopies:
        same_tree = self._order.is_of(plan)
        self.clear()
        order = self._order if same_tree else BucketOrder(plan)
        if record or self._agreement is None:
            self._order = order
        copies = _PersistentCopies(plan, self._slots, self._broadcast_buffers)
        # Before the order is known each parameter is a bucket, for one pass, so that each has a time of arrival.
        copies.learns_order = record and order.known is None
        first, cap = (1, 1) if copies.learns_order else (self._first_bytes, self._cap_bytes)
        with torch.enable_grad():
            copies.make(first, cap, order, self.sums, self.passes, arrivals)
        return copies


class _PersistentCopies:
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
        """Fills `by_slot`, with buckets in the order of the gradients. ``arrivals``: as for `CurrentValues.refresh`."""
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
                if copy is not tensor and i not in not_sent and has_strides(tensor)
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
        if isinstance(sums, ExchangedSums) and passes is not None:
            waiting: Sequence[WaitingBucket] = [
                ExchangedBucket(sums, of_bucket, self._streams) for of_bucket in sources
            ]
            if waiting:
                chain = self._chain(passes, waiting, order)
                handles, token = make_sources(chain)
        else:
            waiting = [WaitingBucket(sums, of_bucket, self._streams) for of_bucket in sources]
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
                at_positions(group, later),
                handles[position],
            )
            token = maker.token
            if order.known is None and chain is None:  # the tokens would impose an order
                token = first_token
            put(self.by_slot, group, outputs)
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
    dense = [tensor for tensor in tensors if has_strides(tensor)]
    return [
        len(dense),
        *map(type, tensors),
        *map(_KIND, tensors),
        *map(Tensor.stride, dense),
        *map(Tensor.data_ptr, dense),
    ]
