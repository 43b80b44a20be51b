"""A bucket of parameters in autograd's graph: the nodes over which its gradients go from the slots to the source.

For each bucket there are ::

    parameters <-- FromSource <-- ToSlots <-- OnSlot, one for each slot <-- its copies

and between them one edge for the whole bucket, however many tensors it has. The engine runs each `OnSlot` in the thread
of the slot's device, so gradients are flattened on all devices at a time, and as soon as a slot has its last one. What
is left to the root's thread, where every device's backward ends, is to add a few flat buffers.

An edge carries an *envelope*: an empty tensor, which autograd takes for the gradient, with what it stands for as a
Python attribute. To gradients that go from one stream to another the engine applies ``record_stream``, which would keep
their memory from being used again until the host looks; flat buffers are held by ``streams.gradients`` instead.
That the engine orders streams for the envelope orders them for what is in it, which was made before. Hooks of the
user on these nodes may look at an envelope, not change it: `contents_of`.

All nodes belong to the streams of the caller (`OnSlot` of an isolated slot to that slot's own), and so do the
parameters' ``AccumulateGrad`` nodes: a loss that uses a parameter directly adds its gradient on the same stream. Sums
are made on side streams. The caller's stream has to wait for them before anything uses them, and is not to while it
computes: `FromSource` makes it wait, and runs when the root's thread has nothing else to do, which is after the root's
own backward.

``replicate`` and the composable forms build graphs of these nodes. Single tensors go through ``functions.Broadcast``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from dataparallel import _torch, comm
from dataparallel.autograd.functions import (
    copies_for_slots,
    run_when_nothing_else_is_ready,
    sum_as_soon_as_ready,
    sums_over_slots,
)
from dataparallel.comm import settings
from dataparallel.comm.buckets import Bucket, Layout, Planned, flatten, plan_buckets, unflatten
from dataparallel.profiling import stage
from dataparallel.streams.current import Event, streams_set
from dataparallel.streams.gradients import GradientStreams, side_stream
from dataparallel.streams.isolated import slot_streams
from dataparallel.streams.nodes import memory_of, note_streams, on_streams_of, wait_for_streams

__all__ = ["FromSource", "OnSlot", "SlotGradients", "ToSlots", "broadcast_bucket", "contents_of"]


def broadcast_bucket(
    slots: Sequence[torch.device],
    tensors: Sequence[Tensor],
    beside: GradientStreams | None,
    to_slots: Callable[..., Sequence[Tensor]] | None = None,
    may_flatten: Callable[[], bool] | None = None,
    when_complete: Callable[[], None] | None = None,
) -> list[tuple[Tensor, ...]]:
    """The tensors on every slot, as outputs of the graph; their gradients are summed as soon as the last one is there.

    Args:
        slots: devices.
        tensors: of one dtype, on one device; they need gradients.
        beside: for gradients that travel on side streams, where the tensors are on the first slot's accelerator.
        to_slots: applies another kind of `ToSlots`, with the same arguments.
        may_flatten: asked in each backward whether a slot's gradients are going to travel.
        when_complete: called in each backward when a slot has its last gradient, by the thread of the slot's device.
    """
    packing = Packing(slots, tensors, may_flatten)
    packing.when_complete = when_complete
    handle = FromSource.apply(*tensors)
    if beside is not None:
        run_when_nothing_else_is_ready(handle.grad_fn)
    handles = (to_slots or ToSlots.apply)(slots, beside, handle)
    streams = slot_streams(slots)
    outputs = []
    for slot, copies in enumerate(copies_for_slots(tensors, slots, packing.planned)):
        with streams_set({slots[slot]: streams[slot].stream} if slot in streams else {}):
            outputs.append(OnSlot.apply(handles[slot], copies, packing))
    return outputs


def _handle(device: torch.device) -> Tensor:
    """What an envelope is the gradient of."""
    return torch.empty(0, dtype=torch.float32, device=device)


def _enveloped(contents: Any, device: torch.device) -> Tensor:
    envelope = _handle(device)
    envelope.contents = contents  # type: ignore[attr-defined]
    return envelope


class Packing:
    """How the gradients of one bucket are flattened; the same on every slot.

    Attributes:
        planned: how the tensors themselves travel, if they do.
        when_complete: see `broadcast_bucket`.
    """

    when_complete: Callable[[], None] | None = None

    def __init__(
        self, slots: Sequence[torch.device], tensors: Sequence[Tensor], may_flatten: Callable[[], bool] | None
    ) -> None:
        self._may_flatten = may_flatten
        self._layouts: dict[int, Layout] = {}
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self.planned: Planned | None = None
        if comm.sums_travel_flat(slots, tensors):
            self.planned = plan_buckets(tensors, sys.maxsize)
            buckets, _ = self.planned
            if any(bucket.keeps_repeats for bucket in buckets):  # gradients have none
                buckets, _ = plan_buckets(tensors, sys.maxsize, keep_repeats=False)
            for bucket in buckets:  # one, or none
                self._layouts = dict(sorted(zip(bucket.indices, bucket.layouts, strict=True)))
                self._all_of_them = self._buckets[tuple(self._layouts)] = bucket

    def bucket_of(self, grads: Sequence[Tensor | None]) -> Bucket | None:
        """Those that travel as one buffer, the same object for the same ones; ``None`` if there are none."""
        if not self._layouts or torch.is_grad_enabled() or (self._may_flatten is not None and not self._may_flatten()):
            return None
        if {*map(type, grads)} == _PLAIN and {*map(_layout, grads)} == _STRIDED:
            return self._all_of_them
        positions = tuple([i for i in self._layouts if _is_plain(grads[i])])
        if not positions:
            return None
        bucket = self._buckets.get(positions)
        if bucket is None:
            # Threads of several devices may come at the same time; all have to get the same one.
            made = Bucket.of([(i, self._layouts[i]) for i in positions])
            bucket = self._buckets.setdefault(positions, made)
        return bucket


_PLAIN, _STRIDED = {Tensor}, {torch.strided}
_layout = attrgetter("layout")


def _is_plain(grad: Tensor | None) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided


class SlotGradients:
    """What one slot has for a bucket: ``flat``, those of ``bucket`` in one buffer, and ``others`` by position."""

    __slots__ = ("bucket", "count", "flat", "others")

    def __init__(self, grads: Sequence[Tensor | None], bucket: Bucket | None = None) -> None:
        self.count = len(grads)
        self.bucket = bucket
        self.flat: Tensor | None = None
        self.others: dict[int, Tensor] = {}
        if bucket is not None:
            self.flat = flatten(bucket, grads)  # type: ignore[arg-type]
            if len(bucket.indices) == self.count:
                return
        in_bucket = () if bucket is None else {*bucket.indices}
        self.others = {i: grad for i, grad in enumerate(grads) if grad is not None and i not in in_bucket}

    @property
    def is_empty(self) -> bool:
        """Whether there is no gradient."""
        return self.flat is None and not self.others

    def each(self) -> list[Tensor | None]:
        """All of them, by position."""
        grads: list[Tensor | None] = [None] * self.count
        for i, grad in self.others.items():
            grads[i] = grad
        if self.bucket is not None and self.flat is not None:
            for i, grad in zip(self.bucket.indices, unflatten(self.bucket, self.flat), strict=True):
                grads[i] = grad
        return grads


class OnSlot(Function):
    """``OnSlot.apply(handle, copies, packing)``: the copies, of which this slot's gradients come together here."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, copies: Sequence[Tensor], packing: Packing) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device, ctx.packing = handle.device, packing
        sum_as_soon_as_ready(ctx)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        packing: Packing = ctx.packing
        if packing.when_complete is not None:
            packing.when_complete()
        brought = SlotGradients(grads, packing.bucket_of(grads))
        return (None if brought.is_empty else _enveloped(brought, ctx.device)), None, None


class ToSlots(Function):
    """``ToSlots.apply(slots, beside, handle)``: a handle for each slot. Backward sums over slots, in their order."""

    @staticmethod
    def forward(ctx: Any, slots: Sequence[torch.device], beside: GradientStreams | None, handle: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.beside, ctx.source = beside, handle.device
        note_streams(ctx, [handle.device], slots)
        ctx.slot_streams = slot_streams(slots)
        ctx.settings = settings.current()  # backward may run in a thread that knows nothing of the caller's
        sum_as_soon_as_ready(ctx)
        return tuple([_handle(device) for device in slots])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        with on_streams_of(ctx, ()):  # the envelopes' contents were made on them, by `OnSlot`
            return None, None, ToSlots.summed(ctx, ToSlots.brought(ctx, envelopes))

    @staticmethod
    def brought(ctx: Any, envelopes: Sequence[Tensor | None]) -> list[SlotGradients | None]:
        """What each slot has. The streams of the forward are current: this thread's own know nothing of gradients."""
        contents: list[SlotGradients | None] = [*map(contents_of, envelopes)]
        for slot, own in ctx.slot_streams.items():
            of_slot = contents[slot]
            if of_slot is not None:
                _take_over(of_slot, own.stream, ctx.beside is not None)
        return contents

    @staticmethod
    def summed(ctx: Any, brought: Sequence[SlotGradients | None]) -> Tensor | None:
        """An envelope with the sums, for the source."""
        present = [of_slot for of_slot in brought if of_slot is not None and not of_slot.is_empty]
        if not present:
            return None
        with stage("reduce_add"), settings.held(ctx.settings):
            sums, ready = _sums(present, ctx.source, ctx.beside)
            return _enveloped(SourceGradients(sums, ready), ctx.source)

    @staticmethod
    def handed_on(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor:
        """An envelope with gradients that are on the source's device, and its caller's stream, for it."""
        return _enveloped(SourceGradients(grads, None), ctx.source)


def _take_over(of_slot: SlotGradients, stream: torch.Stream, is_beside: bool) -> None:
    """Gradients of an isolated slot, which has a ``stream`` of its own on its device: that gets their memory back."""
    grads = [grad for grad in (of_slot.flat, *of_slot.others.values()) if grad is not None]
    wait_for_streams({stream.device: stream}, grads)
    if is_beside:
        for memory in chain.from_iterable(map(memory_of, grads)):
            memory.record_stream(side_stream(stream.device))


class SourceGradients(NamedTuple):
    """What the source gets for a bucket. ``ready``: what a stream has to wait for before it uses that, if anything."""

    grads: Sequence[Tensor | None]
    ready: Event | None


def contents_of(envelope: Tensor | None) -> Any:
    """What an envelope stands for; the envelope does not hold it any longer.

    Raises ``RuntimeError`` for one that a hook has changed or made: what it stands for is not what the hook means.
    """
    if envelope is None:
        return None
    if _torch.version_of(envelope) != 0 or "contents" not in envelope.__dict__:
        raise RuntimeError(
            "a hook has changed a gradient between OnSlotBackward, ToSlotsBackward and FromSourceBackward, nodes that "
            "carry those of many parameters at a time. What autograd sees there is an empty tensor that stands for "
            "them, and hooks on these nodes cannot change gradients. Use Tensor.register_hook: on a parameter of the "
            "model for the sum over the replicas, inside forward on a replica's parameter for that replica's gradient"
        )
    return envelope.__dict__.pop("contents")


def _sums(
    brought: Sequence[SlotGradients], destination: torch.device, beside: GradientStreams | None
) -> tuple[list[Tensor | None], Event | None]:
    """The sums, and the event after which they are there."""
    if torch.is_grad_enabled():
        beside = None
    travelling = None if beside is None else beside.travelling
    bucket = brought[0].bucket
    if any(of_slot.bucket is not bucket for of_slot in brought):
        brought, bucket = [SlotGradients(of_slot.each()) for of_slot in brought], None
    sums: list[Tensor | None] = [None] * brought[0].count
    if any(of_slot.others for of_slot in brought):
        others = [[*map(of_slot.others.get, range(of_slot.count))] for of_slot in brought]
        sums = sums_over_slots(others, destination, travelling)
    if bucket is not None:
        flats = [of_slot.flat for of_slot in brought if of_slot.flat is not None]
        total = comm.add_flat(flats, destination, travelling=travelling)
        for i, part in zip(bucket.indices, unflatten(bucket, total), strict=True):
            sums[i] = part
    return sums, None if beside is None else Event(side_stream(destination))


class FromSource(Function):
    """``FromSource.apply(*tensors)``: a handle for them.

    The node belongs to the stream that is current now, and has it wait for the sums. A parameter's ``AccumulateGrad``
    belongs to that stream too, where it is new.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count, ctx.source = len(tensors), tensors[0].device
        sum_as_soon_as_ready(ctx)
        return _handle(tensors[0].device)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None) -> tuple[Tensor | None, ...]:
        if envelope is None:
            return (None,) * ctx.count
        found: SourceGradients = contents_of(envelope)
        if found.ready is not None:
            found.ready.hold_back(torch.accelerator.current_stream(ctx.source))
        return tuple(found.grads)
