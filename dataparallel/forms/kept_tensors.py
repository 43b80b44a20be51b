"""`KeptTensors` makes replicas' parameters and buffers once, and gives them the source's values at each forward.

They are outputs of one broadcast and keep its autograd nodes, so autograd works as with new copies. Leaf parameters
would not do: ``torch.autograd.grad`` finds no path through them to the source, and hooks on them run several times.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.autograd.bucket_gradients import GradientStreams, broadcast_bucket
from dataparallel.comm import settings
from dataparallel.comm.buckets import fill_buckets, has_strides
from dataparallel.comm.streams.current import current_streams
from dataparallel.gradients.gradient_sums import GradientSums, ReducerBucket, SourceBucket
from dataparallel.gradients.ordered_pass import BucketRow, ModulePasses, Reducer
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.build import make_parameters
from dataparallel.replicas.kept_replicas import TensorStore
from dataparallel.replicas.kept_values import CurrentValues
from dataparallel.replicas.plan import ModulePlan, names_of
from dataparallel.replicas.replicate import Copies
from dataparallel.replicas.stamp import kinds_of, layouts_of

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Lane


class KeptTensors(TensorStore):
    """The tensors of one module on all of its slots. One thread at a time may use them.

    Copies belong to the thread whose call has made them. A call of another thread makes new copies: it would write to
    memory that the first thread may read at the same time, and nothing orders the two. A thread that runs only backward
    is not noticed: it should not run beside another thread's forward.

    ``slots``: all slots; a call may use only the first few. ``passes``: the module's, if a `Reducer` gets the sums.
    """

    def __init__(self, slots: list[torch.device], first_bytes: int, cap_bytes: int, broadcast_buffers: bool) -> None:
        self.sums = GradientSums()
        self.passes: ModulePasses | None = None
        self._lane: Lane | None = None
        self.copies: _KeptCopies | None = None
        self._slots, self._broadcast_buffers = slots, broadcast_buffers
        self._first_bytes, self._cap_bytes = first_bytes, cap_bytes
        self._order = BucketOrder(None)

    def __reduce__(self) -> tuple[type[KeptTensors], tuple[Any, ...]]:
        return KeptTensors, (self._slots, self._first_bytes, self._cap_bytes, self._broadcast_buffers)

    def for_call(self, copies: Copies) -> list[list[Tensor]]:
        """See `TensorStore.for_call`. Parameters are `ReplicaParameter`, also if no graph is recorded.

        Slot 0's tensors, and parameters of other slots on its device, share the source's memory. The sizes of buckets
        were given before. The user of a wrapper may have assigned other slots.
        """
        slots = copies.slots
        if self._slots[: len(slots)] != slots:
            self.clear()
            self._slots = list(slots)
        with torch.inference_mode(False):
            if copies.record and self._lane is not None:
                self._send_buffers(self._lane, copies.plan)
            # No local variable may hold the old copies: the new ones need their memory.
            if self.copies is None or not self._may_use_again(self.copies, copies.plan, copies.record):
                self.copies = self._make_copies(copies)
            else:
                self.sums.drop_void()
                self.copies.values.refresh(copies.arrivals)
            return self.copies.by_slot[: len(slots)]

    def start_afresh_after_fork(self) -> None:
        self.sums.start_afresh_after_fork()

    def clear(self) -> None:
        """Drops all copies, and adds the gradients that wait on slots to the source's ``.grad``."""
        self.sums.add_kept()
        self.copies = self.replicas = None

    def reduce_by(self, reducer: Reducer, lane: Lane | None = None) -> None:
        """Gives the sums over the slots to ``reducer``, from the next backward on.

        Called between steps: a forward that still waits for its backward may not use the reducer. With several machines
        each recorded forward begins with the buffers of rank 0, which go through ``lane``.
        """
        self._lane = lane or self._lane
        if self.passes is not None:
            self.passes.reducer = reducer
            return
        self.clear()
        self.passes = ModulePasses(reducer)
        self.passes.sums.are_on, self.sums.are_on = self.sums.are_on, True  # graphs over the old copies sum
        self.sums = self.passes.sums

    def _may_use_again(self, copies: _KeptCopies, plan: ModulePlan, record: bool) -> bool:
        if record and self._order.known is None and not copies.learns_order:
            return False
        if self._lane is None:
            # `learn` goes before `still_fit`, which is false if threads take turns: they would never learn the order.
            has_order = not self._order.learn(copies.order)
        else:  # a forward without grad mode may run on one machine alone, so it decides nothing
            has_order = copies.order is self._order.known or not record
        return has_order and copies.still_fit(plan, self._slots)

    def _send_buffers(self, lane: Lane, plan: ModulePlan) -> None:
        """Gives buffers the values of rank 0 where a recorded forward begins, as other slots get slot 0's values.

        Version counters stay as they are, so a graph that saved a buffer can still run its backward.
        """
        from dataparallel.machines.start import send_values

        if self._broadcast_buffers:
            names, parameters = names_of(plan), {*plan.parameters}
            buffers = {names[i]: tensor for i, tensor in enumerate(plan.tensors) if i not in parameters}
            send_values(lane, {name: each.data for name, each in buffers.items() if not each.requires_grad})
        if not self._order.is_of(plan):
            self._order = BucketOrder(plan)

    def _make_copies(self, wanted: Copies) -> _KeptCopies:
        self.clear()
        plan, record = wanted.plan, wanted.record
        order = self._order if self._order.is_of(plan) else BucketOrder(plan)
        if record or self._lane is None:
            self._order = order
        copies = _KeptCopies(plan, self._slots, self._cap_bytes, record, wanted.arrivals)
        with torch.enable_grad():
            copies.make(order, self._first_bytes, self._broadcast_buffers, self.sums, self.passes)
        return copies


class BucketOrder:
    """The order of a module's parameters in buckets: their gradients arrive in this order.

    Until it is known, the reverse of the order of registration is used. All machines take rank 0's order, because they
    launch buckets in one order. It holds the source's tensors strongly: torch swaps no tensor with weak references.

    Attributes:
        known: positions in the plan; ``None`` until the order is known.
        arrived: positions of the gradients that have arrived, in that order, until ``known`` is set.
    """

    def __init__(self, plan: ModulePlan | None) -> None:
        self.known: list[int] | None = None
        self.arrived: list[int] = []
        self._tensors = [] if plan is None else plan.tensors
        self._recorded = [] if plan is None else _positions_with_grad(plan)
        self._identity = None if plan is None else _identity_of(plan)

    def is_of(self, plan: ModulePlan) -> bool:
        """True if this is the order of a plan with the same tensors, of which the same ones need gradients."""
        return _identity_of(plan) == self._identity

    def from_arrivals(self) -> list[int]:
        """Returns the positions whose gradients have arrived, then the others in the reverse order of registration."""
        return [*dict.fromkeys([*self.arrived, *reversed(self._recorded)])]

    def learn(self, used: list[int] | None) -> bool:
        """Sets ``known`` and returns True, if a pass over copies made with the order ``used`` has shown the order."""
        if self.known is not None or not self.arrived or used is not self.known:
            return False
        self.known = self.from_arrivals()
        return True

    def proposal(self) -> list[int] | None:
        return self.from_arrivals() if self.known is None else None

    def agree(self, order: Sequence[int] | None) -> None:
        self.known = self.known or (None if order is None else [*order])


def _positions_with_grad(plan: ModulePlan) -> list[int]:
    return [i for i, tensor in enumerate(plan.tensors) if tensor.requires_grad]


def _identity_of(plan: ModulePlan) -> tuple[Any, ...]:
    """The tensors, which the caller holds, and what each of them is."""
    return [*map(id, plan.tensors)], plan.parameters, _positions_with_grad(plan)


def _stamp_of(plan: ModulePlan, slots: list[torch.device]) -> tuple[Any, ...]:
    """All that copies depend on, except values. The tensors of the plan and the caller's thread and streams are in it.

    A swap gives a parameter another node in the graph, also where it gives the same memory: so addresses of tensors.
    """
    return (
        threading.get_ident(),
        [*slots],
        _identity_of(plan),
        kinds_of(plan.tensors),
        [*map(_torch.tensor_address, plan.tensors)],
        plan.read_directly,
        current_streams(slots),
        settings.current(),
    )


class _KeptCopies(Copies):
    """Copies that were made together, with the state of the source and of the caller at that time.

    ``recorded``: positions in the plan of tensors that need gradients, and ``buckets`` the same positions, in buckets.
    ``order``: theirs; ``None`` if it was not known. ``learns_order``: a pass through these copies shows the order.
    """

    buckets: list[list[int]]
    order: list[int] | None
    learns_order: bool

    def still_fit(self, plan: ModulePlan, slots: list[torch.device]) -> bool:
        """True if new copies would differ from these in their values only, and the same streams would wait for them.

        False for another thread than the one that has made the copies: it would write values while the first one reads.
        """
        is_same = self._stamp == _stamp_of(plan, slots) and layouts_of(self._strided) == self._layouts
        return is_same and not self._has_sparse  # whose values come with new indices

    def make(
        self, order: BucketOrder, first_bytes: int, sends_buffers: bool, sums: GradientSums, passes: ModulePasses | None
    ) -> None:
        """Fills `by_slot`, with buckets in the order of the gradients."""
        plan, slots, tensors, parameters = self.plan, self.slots, self.plan.tensors, {*self.plan.parameters}
        self._streams, self._stamp = current_streams(slots), _stamp_of(plan, slots)
        self.recorded = _positions_with_grad(plan)
        self.order, self.learns_order = order.known, self.record and order.known is None
        self._has_sparse = any(tensor.layout not in (torch.strided, torch.jagged) for tensor in tensors)
        self.values = CurrentValues(tensors, slots, self.by_slot, plan.parameters, plan.read_directly)
        # Until the order is known, for one pass, each parameter is a bucket: so each gradient's arrival is noted.
        if self.learns_order:
            first_bytes = self.cap_bytes = 1
        self.buckets = fill_buckets(tensors, order.known or self.recorded[::-1], first_bytes, self.cap_bytes)
        self._make_recorded(order, sums, passes)
        recorded = {*self.recorded}
        constant = [i for i in plan.parameters if i not in recorded]
        buffers = [i for i in range(len(tensors)) if i not in recorded and i not in parameters]
        self.send_constants(constant)
        self.values.send_at_each_forward(constant, self.cap_bytes, False)
        self.send_buffers(buffers)
        if sends_buffers:
            self.values.send_at_each_forward(buffers, self.cap_bytes, True)
        if self.arrivals is not None:
            self.values.launch(self.late, self.arrivals)
        self.arrivals, self.late = None, []  # they belong to one call
        for on_slot in self.by_slot:
            make_parameters(plan, on_slot, ReplicaParameter)
        self.values.note_versions()
        # Slot 0's buffers are the source's. Buffers that are not sent keep what forward writes to them.
        not_sent = () if sends_buffers else {*buffers}
        # A forward may give others memory: by ``set_``, by ``.data =``, or by `flatten_parameters` of torch's RNNs.
        self._strided = [
            copy
            for on_slot in self.by_slot
            for i, (copy, tensor) in enumerate(zip(on_slot, tensors, strict=True))
            if copy is not tensor and i not in not_sent and has_strides(tensor)
        ]
        self._layouts = layouts_of(self._strided)

    def _make_recorded(self, order: BucketOrder, sums: GradientSums, passes: ModulePasses | None) -> None:
        sources = [[self.plan.tensors[i] for i in group] for group in self.buckets]
        row: BucketRow | None = None
        handles: Sequence[Tensor | None] = [None] * len(sources)
        if passes is not None and sources:
            names = names_of(self.plan)
            reduced = [
                ReducerBucket(sums, of_bucket, self._streams, [names[i] for i in group])
                for of_bucket, group in zip(sources, self.buckets, strict=True)
            ]
            row = BucketRow(passes, reduced, self._streams, order)
            handles = row.make_handles()
        gradient_streams = GradientStreams.for_forward(self.slots, self._streams)
        for position, group in reversed([*enumerate(self.buckets)]):
            outputs = broadcast_bucket(
                self.slots,
                sources[position],
                None if gradient_streams is None else gradient_streams.for_bucket(position),
                SourceBucket(sums, sources[position], self._streams).sum if row is None else partial(row.sum, position),
                lambda: sums.are_on,
                # The slots' threads note an arrival: the root's thread may be late and then take buckets in any order.
                None if order.known is not None else partial(order.arrived.append, group[0]),
                self.later(group),
                handles[position],
            )
            self.put(group, outputs)
            if row is not None:
                row.note_copies(position, outputs)
            self.values.send_at_each_forward(group, sys.maxsize, False)
