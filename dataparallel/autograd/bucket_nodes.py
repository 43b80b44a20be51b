"""`broadcast_bucket` copies a bucket of parameters to the slots, by three kinds of nodes in autograd's graph::

    parameters <-- FromSource <-- ToSlots <-- OnSlot, one for each slot <-- copies on the slot

One edge joins two nodes for the whole bucket, and carries all its gradients in backward (see ``bucket_gradients``).
Single tensors go through ``functions.Broadcast``. docs/design.rst has the rules of streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.autograd.bucket_gradients import (
    GradientStreams,
    Packing,
    ReadyEvent,
    SlotGradients,
    SourceGradients,
    empty_handle,
    envelope_with,
    take_contents,
)
from dataparallel.autograd.functions import copies_for_slots, sums_over_slots
from dataparallel.autograd.node import Node, note_forward_streams, run_first, run_last, saved_instead
from dataparallel.comm import settings
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.streams.current import memory_of, streams_set
from dataparallel.comm.transport import Later
from dataparallel.profiling import stage


def broadcast_bucket(
    slots: Sequence[torch.device],
    tensors: Sequence[Tensor],
    gradient_streams: GradientStreams | None,
    to_slots: Callable[..., Sequence[Tensor]] | None = None,
    may_flatten: Callable[[], bool] | None = None,
    when_complete: Callable[[], None] | None = None,
    later: Later | None = None,
    handle: Tensor | None = None,
    held: object = None,
) -> list[tuple[Tensor, ...]]:
    """The tensors on every slot, with nodes that sum a bucket's gradients as soon as the last slot has them.

    Args:
        slots: devices.
        tensors: tensors of one dtype on one device that need gradients.
        gradient_streams: side streams for the gradients. The tensors are then on the first slot's accelerator.
        to_slots: applies a subclass of `ToSlots`, with the same arguments.
        may_flatten: called in each backward; False if a slot's gradients stay there, so that flattening is of no use.
        when_complete: called in each backward when a slot has its last gradient, by the thread of the slot's device.
        later: receives the bucket's broadcast, which the caller launches; see `comm.broadcast_coalesced`.
        handle: the output of the caller's `FromSource` for the tensors; by default this function makes one.
        held: an object that the graph keeps as long as a backward may still run on the slots; see `saved_instead`.
    """
    packing = Packing(slots, tensors, may_flatten)
    if handle is None:
        handle = FromSource.apply(*tensors)
        if gradient_streams is not None:
            run_last(handle.grad_fn)
    # A node belongs to the stream that is current when it is made.
    with streams_set({} if gradient_streams is None else {handle.device: gradient_streams.sides[handle.device]}):
        handles = (to_slots or ToSlots.apply)(slots, gradient_streams, handle)
    outputs = []
    needs_event, is_held = gradient_streams is not None, held is not None
    with saved_instead(held):
        for slot, copies in enumerate(copies_for_slots(tensors, slots, packing.planned, later)):
            outputs.append(OnSlot.apply(handles[slot], copies, packing, needs_event, when_complete, slot, is_held))
    return outputs


class OnSlot(Node):
    """``OnSlot.apply(handle, copies, packing, needs_event, when_complete, slot, is_held)`` returns copies as outputs.

    Backward flattens the slot's gradients in the thread of its device, so all devices flatten at the same time. The
    node belongs to the computing stream. ``needs_event``: another stream will read the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        copies: Sequence[Tensor],
        packing: Packing,
        needs_event: bool,
        when_complete: Callable[[], None] | None,
        slot: int,
        is_held: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device, ctx.packing, ctx.needs_event, ctx.when_complete = handle.device, packing, needs_event, when_complete
        ctx.slot = slot
        if is_held:
            ctx.save_for_backward(handle)  # see `saved_instead`
        run_first(ctx)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.when_complete is not None:
            ctx.when_complete()
        with stage("gradients", ctx.slot):
            slot_grads = SlotGradients(grads, ctx.packing.bucket_of(grads))
        if slot_grads.is_empty:
            return (None,) * 7
        if ctx.needs_event:
            # The engine has made this node's stream wait for the gradients.
            slot_grads.ready_event = ReadyEvent(torch.accelerator.current_stream(ctx.device))
        return envelope_with(slot_grads, ctx.device), None, None, None, None, None, None


class ToSlots(Node):
    """``ToSlots.apply(slots, gradient_streams, handle)`` returns a handle for each slot. Backward sums over the slots.

    With ``gradient_streams`` the root's side stream has to be current around ``apply``, so that the node belongs to it.
    The engine makes a node's stream wait for all that the node receives, and only the side stream may wait for the
    slots. A pass that is recorded (``create_graph``) adds on the streams of the forward.
    """

    @staticmethod
    def forward(
        ctx: Any, slots: Sequence[torch.device], gradient_streams: GradientStreams | None, handle: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gradient_streams, ctx.source_device = gradient_streams, handle.device
        if gradient_streams is None:
            note_forward_streams(ctx, [handle.device], slots)
        ctx.settings = settings.current()  # backward may run in a thread without the caller's settings
        run_first(ctx)
        return tuple([empty_handle(device) for device in slots])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        with ToSlots.computing_streams_set(ctx):
            return None, None, ToSlots.sum_into_envelope(ctx, ToSlots.take_gradients(envelopes))

    @staticmethod
    def computing_streams_set(ctx: Any) -> AbstractContextManager[None]:
        """Makes the streams of the forward current, on which `OnSlot` has made gradients. It orders nothing.

        `SlotGradients` and side streams wait for the slots' gradients. `FromSource` belongs to the source's stream.
        """
        return streams_set(ctx.streams if ctx.gradient_streams is None else ctx.gradient_streams.computing)

    @staticmethod
    def adding_streams_set(ctx: Any) -> AbstractContextManager[None]:
        """Makes the streams current that add gradients in this pass: side streams, if there are any."""
        return streams_set({} if (gradient_streams := _side_streams(ctx)) is None else gradient_streams.sides)

    @staticmethod
    def take_gradients(envelopes: Sequence[Tensor | None]) -> list[SlotGradients | None]:
        """Takes each slot's gradients out of the envelopes."""
        return [*map(take_contents, envelopes)]

    @staticmethod
    def sum_into_envelope(ctx: Any, by_slot: Sequence[SlotGradients | None]) -> Tensor | None:
        """An envelope with the result of `sum_over_slots`; ``None`` if there is no gradient."""
        sums = ToSlots.sum_over_slots(ctx, by_slot)
        return None if sums is None else envelope_with(sums, ctx.source_device)

    @staticmethod
    def sum_over_slots(ctx: Any, by_slot: Sequence[SlotGradients | None]) -> SourceGradients | None:
        """The sums over the slots, in slot order; ``None`` if there is no gradient.

        The streams of the forward have to be current.
        """
        present = [slot_grads for slot_grads in by_slot if slot_grads is not None and not slot_grads.is_empty]
        if not present:
            return None
        with stage("reduce_add"), settings.held(ctx.settings):
            return _sums(present, ctx)

    @staticmethod
    def envelope_of(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor:
        """An envelope with gradients that are already on the source's device, on its computing stream."""
        return envelope_with(SourceGradients(grads, None, ctx.source_device), ctx.source_device)


def _side_streams(ctx: Any) -> GradientStreams | None:
    return None if torch.is_grad_enabled() else ctx.gradient_streams


def _sums(present: Sequence[SlotGradients], ctx: Any) -> SourceGradients:
    gradient_streams = _side_streams(ctx)
    bucket = present[0].bucket
    if any(slot_grads.bucket is not bucket for slot_grads in present):
        present, bucket = [slot_grads.without_flat() for slot_grads in present], None
    sums: list[Tensor | None] = [None] * present[0].count
    if any(slot_grads.separate for slot_grads in present):
        sums = _separate_sums(present, ctx)
    total = None
    if bucket is not None:
        travelling = None
        if gradient_streams is None:
            for slot_grads in present:
                slot_grads.receive_flat()
        else:
            ready = [grads.ready_event for grads in present if grads.flat is not None and grads.ready_event is not None]
            travelling = partial(gradient_streams.side_streams_set, ready_events=ready)
        flats = [slot_grads.flat for slot_grads in present if slot_grads.flat is not None]
        total = comm.add_flat(flats, ctx.source_device, travelling=travelling)
        for i, grad in zip(bucket.indices, unflatten(bucket, total), strict=True):
            sums[i] = grad
    return SourceGradients(sums, gradient_streams, ctx.source_device, bucket, total)


def _separate_sums(present: Sequence[SlotGradients], ctx: Any) -> list[Tensor | None]:
    """The sums of gradients that are not in flat buffers.

    Side streams allocate the memory that they need: memory of a computing stream would be free only after all work that
    this stream has been given. ``record_stream`` names the computing stream, which uses the sums.
    """
    with ToSlots.adding_streams_set(ctx):
        for slot_grads in present:
            slot_grads.receive_separate()
        separate = [[*map(slot_grads.separate.get, range(slot_grads.count))] for slot_grads in present]
        sums = sums_over_slots(separate, ctx.source_device)
    if (gradient_streams := _side_streams(ctx)) is not None:
        for memory in chain.from_iterable(memory_of(total) for total in sums if total is not None):
            memory.record_stream(gradient_streams.computing[ctx.source_device])
    return sums


class FromSource(Node):
    """``FromSource.apply(*tensors)`` returns a handle for the tensors. Backward returns their gradients.

    The node belongs to the stream that is current in its forward. The engine makes that stream wait for the sums, and
    runs the node when the root's thread has nothing else to do: after the root's own backward. A new ``AccumulateGrad``
    of a parameter belongs to that stream too, so a loss that uses the parameter itself adds on the same stream.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        run_first(ctx)
        return empty_handle(tensors[0].device)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: SourceGradients | None = take_contents(envelope)
        if sums is None:
            return (None,) * ctx.count
        return tuple(sums.take())


class FromWholeSource(Node):
    """``FromWholeSource.apply(counts, *tensors)`` returns a handle for each bucket. ``counts``: how many are in each.

    It takes the place of all `FromSource`: if one tensor has a gradient, the gradients of all others are zeros.
    """

    @staticmethod
    def forward(ctx: Any, counts: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.counts, ctx.tensors = counts, tensors
        run_first(ctx)
        return tuple([empty_handle(tensors[0].device) for _ in counts])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Tensor | None, ...]:
        by_bucket: list[SourceGradients | None] = [*map(take_contents, envelopes)]
        if all(sums is None for sums in by_bucket):
            return (None,) * (1 + len(ctx.tensors))
        grads = chain.from_iterable(
            [None] * count if sums is None else sums.take() for sums, count in zip(by_bucket, ctx.counts, strict=True)
        )
        pairs = zip(grads, ctx.tensors, strict=True)
        return (None, *[torch.zeros_like(tensor) if grad is None else grad for grad, tensor in pairs])
