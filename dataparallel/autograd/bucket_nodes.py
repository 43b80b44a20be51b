"""The nodes of a bucket of parameters in autograd's graph: its gradients go over them from the slots to the source.

Each bucket has these nodes ::

    parameters <-- FromSource <-- ToSlots <-- OnSlot, one for each slot <-- its copies

with one edge between two of them for the whole bucket (see ``bucket_gradients``). Single tensors go through
``functions.Broadcast``. docs/design.rst has the rules of streams.
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
    Made,
    Packing,
    SlotGradients,
    SourceGradients,
    contents_of,
    empty_handle,
    enveloped,
)
from dataparallel.autograd.functions import copies_for_slots, sums_over_slots
from dataparallel.autograd.node import Node, note_forward_streams, run_first, run_last
from dataparallel.comm import settings
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.streams.current import memory_of, streams_set
from dataparallel.comm.transport import Later
from dataparallel.profiling import note_gradients, stage


def broadcast_bucket(
    slots: Sequence[torch.device],
    tensors: Sequence[Tensor],
    gradient_streams: GradientStreams | None,
    to_slots: Callable[..., Sequence[Tensor]] | None = None,
    may_flatten: Callable[[], bool] | None = None,
    when_complete: Callable[[], None] | None = None,
    later: Later | None = None,
    handle: Tensor | None = None,
) -> list[tuple[Tensor, ...]]:
    """The tensors on every slot, as outputs of the graph. Their gradients are summed as soon as the last one arrives.

    Args:
        slots: devices.
        tensors: tensors of one dtype on one device that need gradients.
        gradient_streams: side streams for the gradients. Needs the tensors to be on the first slot's accelerator.
        to_slots: applies another kind of `ToSlots`, with the same arguments.
        may_flatten: returns in each backward whether a slot's gradients travel, so that flattening them is of use.
        when_complete: called in each backward when a slot has its last gradient, by the thread of the slot's device.
        later: takes the bucket's broadcast, which the caller launches; see `comm.broadcast_coalesced`.
        handle: the output of a `FromSource` for the tensors that the caller has made; default a new one.
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
    for slot, copies in enumerate(copies_for_slots(tensors, slots, packing.planned, later)):
        is_received = gradient_streams is not None
        outputs.append(OnSlot.apply(handles[slot], copies, packing, is_received, when_complete, slot))
    return outputs


class OnSlot(Node):
    """``OnSlot.apply(handle, copies, packing, is_received, when_complete, slot)``: the copies.

    Backward flattens the slot's gradients, in the thread of its device, so all devices do at the same time. The node
    belongs to the caller's stream, which computes. ``is_received``: another stream is to read them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        copies: Sequence[Tensor],
        packing: Packing,
        is_received: bool,
        when_complete: Callable[[], None] | None,
        slot: int,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device, ctx.packing, ctx.is_received, ctx.when_complete = handle.device, packing, is_received, when_complete
        ctx.slot = slot
        run_first(ctx)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        note_gradients(ctx.slot)
        if ctx.when_complete is not None:
            ctx.when_complete()
        brought = SlotGradients(grads, ctx.packing.bucket_of(grads))
        if brought.is_empty:
            return None, None, None, None, None, None
        if ctx.is_received:
            # The engine has made this node's stream wait for the gradients.
            brought.made = Made(torch.accelerator.current_stream(ctx.device))
        return enveloped(brought, ctx.device), None, None, None, None, None


class ToSlots(Node):
    """``ToSlots.apply(slots, gradient_streams, handle)``: a handle for each slot. Backward sums over the slots.

    With ``gradient_streams`` the root's side stream has to be current around ``apply``, so that the node belongs to it.
    Then only this stream waits for the slots: the engine makes a node's stream wait for all that the node receives. A
    pass that is recorded adds on the caller's streams.
    """

    @staticmethod
    def forward(
        ctx: Any, slots: Sequence[torch.device], gradient_streams: GradientStreams | None, handle: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gradient_streams, ctx.source = gradient_streams, handle.device
        if gradient_streams is None:
            note_forward_streams(ctx, [handle.device], slots)
        ctx.settings = settings.current()  # backward may run in a thread without the caller's settings
        run_first(ctx)
        return tuple([empty_handle(device) for device in slots])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        with ToSlots.computing_streams_set(ctx):
            return None, None, ToSlots.summed(ctx, ToSlots.brought(envelopes))

    @staticmethod
    def computing_streams_set(ctx: Any) -> AbstractContextManager[None]:
        """Makes the streams of the forward current, where `OnSlot` has made gradients, without an order.

        `SlotGradients` and side streams wait for what slots have made. `FromSource` belongs to the source's stream.
        """
        return streams_set(ctx.streams if ctx.gradient_streams is None else ctx.gradient_streams.computing)

    @staticmethod
    def adding_streams_set(ctx: Any) -> AbstractContextManager[None]:
        """Makes the streams current on which gradients of this pass are added: side streams, if there are any."""
        return streams_set({} if (found := _side_streams(ctx)) is None else found.sides)

    @staticmethod
    def brought(envelopes: Sequence[Tensor | None]) -> list[SlotGradients | None]:
        """Each slot's gradients."""
        return [*map(contents_of, envelopes)]

    @staticmethod
    def summed(ctx: Any, brought: Sequence[SlotGradients | None]) -> Tensor | None:
        """An envelope with the sums over the slots; ``None`` if there is no gradient. As `total`."""
        found = ToSlots.total(ctx, brought)
        return None if found is None else enveloped(found, ctx.source)

    @staticmethod
    def total(ctx: Any, brought: Sequence[SlotGradients | None]) -> SourceGradients | None:
        """The sums over the slots, in slot order; ``None`` if there is no gradient.

        The streams of the forward have to be current.
        """
        present = [of_slot for of_slot in brought if of_slot is not None and not of_slot.is_empty]
        if not present:
            return None
        with stage("reduce_add"), settings.held(ctx.settings):
            return _sums(present, ctx)

    @staticmethod
    def handed_on(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor:
        """An envelope with gradients that are already on the source's device and on its caller's stream."""
        return enveloped(SourceGradients(grads, None, ctx.source), ctx.source)


def _side_streams(ctx: Any) -> GradientStreams | None:
    return None if torch.is_grad_enabled() else ctx.gradient_streams


def _sums(brought: Sequence[SlotGradients], ctx: Any) -> SourceGradients:
    gradient_streams = _side_streams(ctx)
    bucket = brought[0].bucket
    if any(of_slot.bucket is not bucket for of_slot in brought):
        brought, bucket = [of_slot.unflattened() for of_slot in brought], None
    sums: list[Tensor | None] = [None] * brought[0].count
    if any(of_slot.others for of_slot in brought):
        sums = _sums_of_others(brought, ctx)
    total = None
    if bucket is not None:
        travelling = None
        if gradient_streams is None:
            for of_slot in brought:
                of_slot.receive_flat()
        else:
            made = [of_slot.made for of_slot in brought if of_slot.flat is not None and of_slot.made is not None]
            travelling = partial(gradient_streams.side_streams_set, made=made)
        flats = [of_slot.flat for of_slot in brought if of_slot.flat is not None]
        total = comm.add_flat(flats, ctx.source, travelling=travelling)
        for i, part in zip(bucket.indices, unflatten(bucket, total), strict=True):
            sums[i] = part
    return SourceGradients(sums, gradient_streams, ctx.source, bucket, total)


def _sums_of_others(brought: Sequence[SlotGradients], ctx: Any) -> list[Tensor | None]:
    """The sums of gradients that are not in flat buffers.

    On side streams all memory that is needed is allocated there: on a computing stream it would be free only after all
    that its thread has launched. ``record_stream`` names the computing stream that uses the sums.
    """
    with ToSlots.adding_streams_set(ctx):
        for of_slot in brought:
            of_slot.receive_others()
        others = [[*map(of_slot.others.get, range(of_slot.count))] for of_slot in brought]
        sums = sums_over_slots(others, ctx.source)
    if (gradient_streams := _side_streams(ctx)) is not None:
        for memory in chain.from_iterable(memory_of(total) for total in sums if total is not None):
            memory.record_stream(gradient_streams.computing[ctx.source])
    return sums


class FromSource(Node):
    """``FromSource.apply(*tensors)``: a handle for them. Backward returns their gradients.

    The node belongs to the stream that is current in its forward. The engine makes it wait for the sums before it runs
    the node, which it does when the root's thread has nothing else to do: after the root's own backward. A parameter's
    ``AccumulateGrad`` that is new belongs to that stream too, so a loss that uses the parameter adds on it as well.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        run_first(ctx)
        return empty_handle(tensors[0].device)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None) -> tuple[Tensor | None, ...]:
        found: SourceGradients | None = contents_of(envelope)
        if found is None:
            return (None,) * ctx.count
        return tuple(found.take())
