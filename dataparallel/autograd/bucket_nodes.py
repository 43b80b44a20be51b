"""The nodes of a bucket of parameters in autograd's graph: its gradients go over them from the slots to the source.

Each bucket has these nodes ::

    parameters <-- FromSource <-- ToSlots <-- OnSlot, one for each slot <-- its copies

with one edge between two of them for the whole bucket (see ``bucket_gradients``). The engine runs each `OnSlot` in the
thread of the slot's device. So all devices flatten gradients at the same time, each as soon as it has the bucket's last
gradient. Every backward ends in the root's thread, and that thread only adds a few flat buffers.

These rules order the streams:

- All nodes belong to the streams of the caller, except `OnSlot` of an isolated slot, which belongs to that slot's
  stream. The parameters' ``AccumulateGrad`` nodes belong to the caller's streams too, so a loss that uses a parameter
  directly adds its gradient on the same stream.
- Sums are made on side streams (``streams.gradients``). The caller's stream has to wait for a sum before anything uses
  it, but not while it still computes. So `FromSource` makes it wait, and runs when the root's thread has nothing else
  to do, which is after the root's own backward.

``replicate`` and the composable forms build graphs of these nodes. Single tensors go through ``functions.Broadcast``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dataparallel import comm
from dataparallel.autograd.bucket_gradients import (
    Packing,
    SlotGradients,
    SourceGradients,
    contents_of,
    empty_handle,
    enveloped,
)
from dataparallel.autograd.functions import copies_for_slots, sums_over_slots
from dataparallel.autograd.node_order import run_first, run_last
from dataparallel.comm import settings
from dataparallel.comm.buckets import unflatten
from dataparallel.comm.transport import Later
from dataparallel.profiling import stage
from dataparallel.streams.current import Event, streams_set
from dataparallel.streams.gradients import GradientStreams, side_stream
from dataparallel.streams.isolated import isolated_streams
from dataparallel.streams.nodes import forward_streams_set, memory_of, note_forward_streams

__all__ = ["FromSource", "OnSlot", "ToSlots", "broadcast_bucket"]


def broadcast_bucket(
    slots: Sequence[torch.device],
    tensors: Sequence[Tensor],
    gradient_streams: GradientStreams | None,
    to_slots: Callable[..., Sequence[Tensor]] | None = None,
    may_flatten: Callable[[], bool] | None = None,
    when_complete: Callable[[], None] | None = None,
    later: Later | None = None,
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
    """
    packing = Packing(slots, tensors, may_flatten)
    handle = FromSource.apply(*tensors)
    if gradient_streams is not None:
        run_last(handle.grad_fn)
    handles = (to_slots or ToSlots.apply)(slots, gradient_streams, handle)
    streams = isolated_streams(slots)
    outputs = []
    for slot, copies in enumerate(copies_for_slots(tensors, slots, packing.planned, later)):
        with streams_set({slots[slot]: streams[slot].stream} if slot in streams else {}):
            outputs.append(OnSlot.apply(handles[slot], copies, packing, when_complete))
    return outputs


class OnSlot(Function):
    """``OnSlot.apply(handle, copies, packing, when_complete)``: the copies. Backward flattens the slot's gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        copies: Sequence[Tensor],
        packing: Packing,
        when_complete: Callable[[], None] | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device, ctx.packing, ctx.when_complete = handle.device, packing, when_complete
        run_first(ctx)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.when_complete is not None:
            ctx.when_complete()
        brought = SlotGradients(grads, ctx.packing.bucket_of(grads))
        return (None if brought.is_empty else enveloped(brought, ctx.device)), None, None, None


class ToSlots(Function):
    """``ToSlots.apply(slots, gradient_streams, handle)``: a handle for each slot. Backward sums over the slots."""

    @staticmethod
    def forward(
        ctx: Any, slots: Sequence[torch.device], gradient_streams: GradientStreams | None, handle: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gradient_streams, ctx.source = gradient_streams, handle.device
        note_forward_streams(ctx, [handle.device], slots)
        ctx.isolated_streams = isolated_streams(slots)
        ctx.settings = settings.current()  # backward may run in a thread without the caller's settings
        run_first(ctx)
        return tuple([empty_handle(device) for device in slots])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        with forward_streams_set(ctx, ()):  # `OnSlot` has made the envelopes' contents on these streams
            return None, None, ToSlots.summed(ctx, ToSlots.brought(ctx, envelopes))

    @staticmethod
    def brought(ctx: Any, envelopes: Sequence[Tensor | None]) -> list[SlotGradients | None]:
        """Each slot's gradients, ready for the streams of the forward, which have to be current."""
        contents: list[SlotGradients | None] = [*map(contents_of, envelopes)]
        for slot, own in ctx.isolated_streams.items():
            of_slot = contents[slot]
            if of_slot is not None:
                _receive_from_isolated(of_slot, own.stream, ctx.gradient_streams is not None)
        return contents

    @staticmethod
    def summed(ctx: Any, brought: Sequence[SlotGradients | None]) -> Tensor | None:
        """An envelope with the sums over the slots, in slot order; ``None`` if there is no gradient."""
        present = [of_slot for of_slot in brought if of_slot is not None and not of_slot.is_empty]
        if not present:
            return None
        with stage("reduce_add"), settings.held(ctx.settings):
            return enveloped(_sums(present, ctx.source, ctx.gradient_streams), ctx.source)

    @staticmethod
    def handed_on(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor:
        """An envelope with gradients that are already on the source's device and on its caller's stream."""
        return enveloped(SourceGradients(grads, None), ctx.source)


def _receive_from_isolated(of_slot: SlotGradients, stream: torch.Stream, use_side_stream: bool) -> None:
    """Makes the current stream wait for an isolated slot's ``stream``, and calls ``record_stream`` on its gradients.

    Their memory returns to ``stream`` when it is freed.
    """
    readers = [torch.accelerator.current_stream(stream.device)]
    Event(stream).make_wait(readers[0])
    if use_side_stream:
        readers.append(side_stream(stream.device))
    flat = () if of_slot.flat is None else (of_slot.flat,)
    for memory in chain.from_iterable(map(memory_of, (*flat, *of_slot.others.values()))):
        for reader in readers:
            memory.record_stream(reader)


def _sums(
    brought: Sequence[SlotGradients], destination: torch.device, gradient_streams: GradientStreams | None
) -> SourceGradients:
    """The sums, with the event after which they are ready."""
    if torch.is_grad_enabled():
        gradient_streams = None
    travelling = None if gradient_streams is None else gradient_streams.side_streams_set
    bucket = brought[0].bucket
    if any(of_slot.bucket is not bucket for of_slot in brought):
        brought, bucket = [SlotGradients(of_slot.as_list()) for of_slot in brought], None
    sums: list[Tensor | None] = [None] * brought[0].count
    if any(of_slot.others for of_slot in brought):
        others = [[*map(of_slot.others.get, range(of_slot.count))] for of_slot in brought]
        sums = sums_over_slots(others, destination, travelling)
    if bucket is not None:
        flats = [of_slot.flat for of_slot in brought if of_slot.flat is not None]
        total = comm.add_flat(flats, destination, travelling=travelling)
        for i, part in zip(bucket.indices, unflatten(bucket, total), strict=True):
            sums[i] = part
    return SourceGradients(sums, None if gradient_streams is None else Event(side_stream(destination)))


class FromSource(Function):
    """``FromSource.apply(*tensors)``: a handle for them. Backward returns their gradients.

    The node belongs to the stream that is current in its forward, and makes it wait for the sums. A parameter's
    ``AccumulateGrad`` that is new belongs to that stream too.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count, ctx.source = len(tensors), tensors[0].device
        run_first(ctx)
        return empty_handle(tensors[0].device)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None) -> tuple[Tensor | None, ...]:
        found: SourceGradients | None = contents_of(envelope)
        if found is None:
            return (None,) * ctx.count
        if found.ready is not None:
            found.ready.make_wait(torch.accelerator.current_stream(ctx.source))
        return tuple(found.grads)
