"""`SlotGradients`, `SourceGradients` and `GradientStreams`: a bucket's gradients on one slot, their sums, the streams.

An edge of the graph carries an *envelope* with the gradients of a whole bucket. A sum waits for the slowest slot. On
the computing streams it would stop every device until then, so side streams add. docs/design.rst has the rules of
streams and memory. `broadcast_bucket` makes the nodes of a bucket::

    parameters <-- FromSource <-- ToSlots <-- OnSlot, one for each slot <-- copies on the slot
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.functions import copies_for_slots, sums_over_slots
from dataparallel.autograd.node import Node, note_forward_streams, run_first, run_last, saved_instead
from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm import settings
from dataparallel.comm.buckets import Bucket, FlatLayout, Planned, flatten, plan_buckets, unflatten
from dataparallel.comm.streams.current import Event, kept_stream, make_current, memory_of, run_apart, streams_set
from dataparallel.comm.transport import Later
from dataparallel.profiling import stage

# ---- envelopes -------------------------------------------------------------------------------------------------------

# An envelope is an empty tensor that autograd takes for the gradient, with its contents in a Python attribute. The
# engine orders streams for the envelope, and thereby for its contents, which were made before. The engine does not see
# the contents: it would call ``record_stream`` on gradients that change streams, and their memory could not be used
# again until the host looks. `GradientStreams` holds the contents instead.


def empty_handle(device: torch.device) -> Tensor:
    """An empty tensor, which a forward returns as a handle. In backward the handle's gradient is an envelope."""
    return torch.empty(0, dtype=torch.float32, device=device)


def envelope_with(contents: Any, device: torch.device) -> Tensor:
    envelope = empty_handle(device)
    envelope.contents = contents  # type: ignore[attr-defined]
    return envelope


def take_contents(envelope: Tensor | None) -> Any:
    """Takes the contents out of an envelope, which hooks may not change; ``None`` for ``None``."""
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


# ---- gradients of a slot and of the source ---------------------------------------------------------------------------


class Packing:
    """Chooses which gradients of one bucket are flattened, for all slots. For arguments see `broadcast_bucket`."""

    def __init__(
        self, slots: Sequence[torch.device], tensors: Sequence[Tensor], may_flatten: Callable[[], bool] | None
    ) -> None:
        self._may_flatten = may_flatten
        self._layouts: dict[int, FlatLayout] = {}
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self.planned: Planned | None = None  # the plan by which the parameters travel as a flat buffer, if they do
        if any(slot != tensors[0].device for slot in slots):
            self.planned = plan_buckets(tensors, sys.maxsize)
            buckets, _ = self.planned
            layouts = [layout for bucket in buckets for layout, _ in bucket.runs]
            if any(layout.core_shape != layout.shape for layout in layouts):  # gradients have no repeated elements
                buckets, _ = plan_buckets(tensors, sys.maxsize, keep_repeats=False)
            for bucket in buckets:  # at most one
                self._layouts = dict(sorted(zip(bucket.indices, bucket.layouts, strict=True)))
                self._full_bucket = self._buckets[tuple(self._layouts)] = bucket

    def bucket_of(self, grads: Sequence[Tensor | None]) -> Bucket | None:
        """The `Bucket` of the gradients that travel as one buffer, if any. Equal positions give the same object."""
        if not self._layouts or torch.is_grad_enabled() or (self._may_flatten is not None and not self._may_flatten()):
            return None
        if {*map(type, grads)} == _PLAIN and {*map(_layout, grads)} == _STRIDED:
            return self._full_bucket
        positions = tuple([i for i in self._layouts if _is_plain(grads[i])])
        if not positions:
            return None
        bucket = self._buckets.get(positions)
        if bucket is None:
            # Threads of several devices may do this at the same time; all of them get the bucket that was stored first.
            new = Bucket.of([(i, self._layouts[i]) for i in positions])
            bucket = self._buckets.setdefault(positions, new)
        return bucket


_PLAIN, _STRIDED = {Tensor}, {torch.strided}
_layout = attrgetter("layout")


def _is_plain(grad: Tensor | None) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided


class SlotGradients:
    """One slot's gradients of a bucket of parameters.

    ``flat`` is one buffer with the gradients that ``bucket`` lists, if any; ``separate`` has all others by position.
    ``ready_event`` is ``None`` where the gradients are on the stream that reads them.
    """

    __slots__ = ("bucket", "count", "flat", "ready_event", "separate")

    def __init__(self, grads: Sequence[Tensor | None], bucket: Bucket | None = None) -> None:
        self.count = len(grads)
        self.bucket = bucket
        self.ready_event: ReadyEvent | None = None
        self.flat: Tensor | None = None
        self.separate: dict[int, Tensor] = {}
        if bucket is not None:
            self.flat = flatten(bucket, grads)  # type: ignore[arg-type]
            if len(bucket.indices) == self.count:
                return
        in_bucket = () if bucket is None else {*bucket.indices}
        self.separate = {i: grad for i, grad in enumerate(grads) if grad is not None and i not in in_bucket}

    @property
    def is_empty(self) -> bool:
        return self.flat is None and not self.separate

    def receive(self) -> None:
        """Makes the current stream of the slot's device wait for the gradients, and calls ``record_stream`` on them."""
        if self.ready_event is not None:
            flat = () if self.flat is None else (self.flat,)
            self.ready_event.receive([*flat, *self.separate.values()])

    def without_flat(self) -> SlotGradients:
        grads = SlotGradients(self.as_list())
        grads.ready_event = self.ready_event
        return grads

    def as_list(self) -> list[Tensor | None]:
        """The gradients by position. Flattened gradients are parts of the flat buffer."""
        grads: list[Tensor | None] = [None] * self.count
        for i, grad in self.separate.items():
            grads[i] = grad
        if self.bucket is not None and self.flat is not None:
            for i, grad in zip(self.bucket.indices, unflatten(self.bucket, self.flat), strict=True):
                grads[i] = grad
        return grads


class SourceGradients:
    """The sums over the slots for a bucket of parameters: the source's gradients. They can be taken once.

    If ``streams`` is not ``None``, a side stream may still write to the gradients, and their memory belongs to the
    computing stream. If nobody takes them, ``__del__`` makes the computing stream wait before the memory is freed.

    Attributes:
        bucket, flat: the `Bucket` that lists the gradients in a flat buffer, and that buffer, if there is one.
    """

    def __init__(
        self,
        grads: Sequence[Tensor | None],
        streams: GradientStreams | None,
        device: torch.device,
        bucket: Bucket | None = None,
        flat: Tensor | None = None,
    ) -> None:
        self._grads, self._streams, self._device = grads, streams, device
        self.bucket, self.flat = bucket, flat

    @property
    def grads_on_side_streams(self) -> Sequence[Tensor | None]:
        """The gradients, for use on the side streams that add them. They can still be taken."""
        return self._grads

    def take(self) -> Sequence[Tensor | None]:
        """The gradients. The caller has to make the computing stream wait before it uses or frees them."""
        self._streams = None
        return self._grads

    def __del__(self) -> None:
        if self._streams is not None:
            self._streams.release_sum(self._device)


# ---- streams ---------------------------------------------------------------------------------------------------------

_BUCKETS_HELD = 2
"""The number of buckets whose flat buffers are held. When one more bucket has been launched, all computing streams but
the root's wait for the oldest bucket's sum, and its buffers are freed."""


class ReadyEvent(Event):
    """An event after all that ``stream`` has been given so far: tensors that ``stream`` makes are ready then."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__(stream)
        self.stream = stream

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Makes the device's current stream wait for the tensors, and calls ``record_stream`` on their memory."""
        reader = torch.accelerator.current_stream(self.stream.device)
        if reader == self.stream:
            return
        self.make_wait(reader)
        for tensor in tensors:
            for memory in memory_of(tensor):
                memory.record_stream(reader)


class GradientStreams:
    """The streams for the gradients of one forward. In each backward they hold the flat buffers in use.

    Attributes:
        computing: for each accelerator of the call, the stream on which it computes.
        sides: for each accelerator, the side stream that adds the gradients of one bucket; see `for_bucket`.
    """

    def __init__(self, computing: dict[torch.device, torch.Stream]) -> None:
        self.computing = computing
        self.sides = {device: kept_stream(device, "gradients") for device in computing}
        self._key = object()  # the key of the held buffers in a `PassOfBackward`

    @classmethod
    def for_forward(
        cls, slots: Sequence[torch.device], computing: dict[torch.device, torch.Stream]
    ) -> GradientStreams | None:
        """The streams for a forward on ``slots``; ``None`` if gradients stay on the streams that compute them."""
        return cls(computing) if run_apart(slots) else None

    def for_bucket(self, number: int) -> GradientStreams:
        """The same computing streams, with the side streams of this bucket.

        Buckets take turns on a few side streams. A sum ends at the root: on a single stream the next sum would begin
        there only after that, although most links are free before.
        """
        streams = copy.copy(self)  # with the same key, so a pass holds the buffers of all buckets together
        streams.sides = {device: kept_stream(device, "gradients", number) for device in self.computing}
        return streams

    @contextmanager
    def side_streams_set(self, buffers: Sequence[Tensor], ready_events: Sequence[ReadyEvent]) -> Iterator[None]:
        """Makes the side streams current inside the block, where work may use ``buffers``.

        Called in the backward of a node, with the computing streams current.

        Args:
            buffers: the slots' flat buffers, then the buffer of the sum, on the root's device. The latter is the first
                buffer, or has just been allocated: the computing stream may still do earlier work in that memory.
            ready_events: one for each slot's buffer. The side streams wait for these events first, but not for what the
                slots have launched since.
        """
        *flats, total = buffers
        root = total.device
        held = running_pass().get(self._key, self._held_until_end)
        for ready in ready_events:
            ready.make_wait(self.sides[ready.stream.device])
        if total is not flats[0]:
            Event(self.computing[root]).make_wait(self.sides[root])
        make_current(self.sides.values())
        try:
            yield
        except BaseException:
            self.release_sum(root)
            raise
        finally:
            make_current(self.computing.values())
            passed_on = [flat for flat in flats if flat is not total]
            for flat in passed_on:
                if flat.device == root:  # of a further slot there: the computing stream must not wait for the sum
                    flat.record_stream(self.sides[root])
            devices = {flat.device for flat in passed_on} - {root}
            held.append((passed_on, [(device, Event(self.sides[device])) for device in devices]))
            self._release(held, _BUCKETS_HELD)

    def release_sum(self, root: torch.device) -> None:
        """Makes the root's computing stream wait for its side stream, which may write to the memory of the sum."""
        Event(self.sides[root]).make_wait(self.computing[root])

    # ``record_stream`` on all buffers would keep those of a whole step: such memory is free only when the host looks
    # again, and by then the host may have launched the whole step.

    def _held_until_end(self, running: PassOfBackward) -> _Held:
        held: _Held = deque()
        running.on_end(lambda ok: self._release(held, 0))
        return held

    def _release(self, held: _Held, left: int) -> None:
        """Releases the oldest buckets' buffers. The computing streams wait for the side streams, but on the root."""
        while len(held) > left:
            buffers, events = held.popleft()
            for device, event in events:
                event.make_wait(self.computing[device])
            del buffers  # only now: the computing stream may use the memory again


_Held: TypeAlias = deque[tuple[Sequence[Tensor], list[tuple[torch.device, Event]]]]
"""The flat buffers of buckets that one pass holds, with an event on each side stream after the last work on them."""


def broadcast_bucket(
    slots: Sequence[torch.device],
    tensors: Sequence[Tensor],
    gradient_streams: GradientStreams | None,
    sums: SumsOfBucket | None = None,
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
        sums: see `ToSlots`.
        may_flatten: called in each backward; False if a slot's gradients stay there, so that flattening is of no use.
        when_complete: called in each backward when a slot has its last gradient, by the thread of the slot's device.
        later: see `comm.broadcast_coalesced`.
        handle: the output of the caller's node for the tensors; by default this function makes a `FromSource`.
        held: see `saved_instead`.
    """
    packing = Packing(slots, tensors, may_flatten)
    if handle is None:
        handle = FromSource.apply(*tensors)
        if gradient_streams is not None:
            run_last(handle.grad_fn)
    # A node belongs to the stream that is current when it is made.
    source = tensors[0].device
    with streams_set({} if gradient_streams is None else {source: gradient_streams.sides[source]}):
        handles = ToSlots.apply(slots, gradient_streams, sums, source, handle)
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


SumsOfBucket: TypeAlias = "Callable[[Any, Sequence[SlotGradients | None]], SourceGradients | None]"
"""Called in the backward of `ToSlots`, with the node and each slot's gradients. The streams of the forward are current.

Returns the gradients for `FromSource`; ``None`` if there are none.
"""


class ToSlots(Node):
    """``ToSlots.apply(slots, gradient_streams, sums, source, handle)`` returns a handle for each slot.

    Backward runs when the last slot has its gradients, and calls ``sums``, or without it `sum_over_slots`. ``source``
    is the device of the tensors.

    With ``gradient_streams`` the root's side stream has to be current around ``apply``, so that the node belongs to it.
    The engine makes a node's stream wait for all that the node receives, and only the side stream may wait for the
    slots. A pass that is recorded (``create_graph``) adds on the streams of the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slots: Sequence[torch.device],
        gradient_streams: GradientStreams | None,
        sums: SumsOfBucket | None,
        source: torch.device,
        handle: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.gradient_streams, ctx.source_device, ctx.sums = gradient_streams, source, sums
        ctx.handle_device = handle.device
        if gradient_streams is None:
            note_forward_streams(ctx, [source], slots)
        ctx.settings = settings.current()  # backward may run in a thread without the caller's settings
        run_first(ctx)
        return tuple([empty_handle(device) for device in slots])

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        by_slot: list[SlotGradients | None] = [*map(take_contents, envelopes)]
        # Those on which `OnSlot` has made gradients, for which sums wait. `FromSource` belongs to the source's stream.
        with streams_set(ctx.streams if ctx.gradient_streams is None else ctx.gradient_streams.computing):
            sums = (ctx.sums or ToSlots.sum_over_slots)(ctx, by_slot)
        return None, None, None, None, None if sums is None else envelope_with(sums, ctx.handle_device)

    @staticmethod
    def adding_streams_set(ctx: Any) -> AbstractContextManager[None]:
        """Makes the streams current that add gradients in this pass: side streams, if there are any."""
        return streams_set({} if (gradient_streams := _side_streams(ctx)) is None else gradient_streams.sides)

    @staticmethod
    def sum_over_slots(ctx: Any, by_slot: Sequence[SlotGradients | None]) -> SourceGradients | None:
        """The sums over the slots, in slot order; ``None`` without gradients. The forward's streams are current."""
        present = [slot_grads for slot_grads in by_slot if slot_grads is not None and not slot_grads.is_empty]
        if not present:
            return None
        with stage("reduce_add"), settings.held(ctx.settings):
            return _sums(present, ctx)


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
        if gradient_streams is not None:
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
            slot_grads.receive()
        separate = [[*map(slot_grads.separate.get, range(slot_grads.count))] for slot_grads in present]
        sums = sums_over_slots(separate, ctx.source_device)
    if (gradient_streams := _side_streams(ctx)) is not None:
        for memory in chain.from_iterable(memory_of(total) for total in sums if total is not None):
            memory.record_stream(gradient_streams.computing[ctx.source_device])
    return sums


class FromSource(Node):
    """``FromSource.apply(*tensors)`` returns a handle for them, on their device. Backward returns their gradients.

    The node belongs to the stream that is current in its forward. The engine makes that stream wait for the sums, and
    runs the node when the root's thread has nothing else to do: after the root's own backward. A new ``AccumulateGrad``
    of a parameter belongs to that stream too, so a loss that uses the parameter itself adds on the same stream.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors
        run_first(ctx)
        return empty_handle(tensors[0].device)

    @staticmethod
    def backward(ctx: Any, envelope: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: SourceGradients | None = take_contents(envelope)
        grads: Sequence[Tensor | None] = [None] * len(ctx.tensors) if sums is None else sums.take()
        # The engine would call hooks with ``None``, because the tensors share this node.
        for (following, _), tensor, grad in zip(ctx.next_functions, ctx.tensors, grads, strict=True):
            if grad is None:
                _spare_hooks(following, tensor)
        return tuple(grads)


def wrap_hooks(hooks: dict[int, Any] | None, wrap: Callable[[Any], Any]) -> None:
    """Puts ``wrap(hook)`` in the place of each of a tensor's hooks, until the running pass ends."""

    def keep_own(running: PassOfBackward) -> None:
        own = dict(hooks or {})
        running.on_end(lambda ok: hooks and hooks.update({key: own[key] for key in own.keys() & hooks.keys()}))

    if hooks:
        running_pass().get(("hooks", id(hooks)), keep_own)
        hooks.update({key: wrap(hook) for key, hook in hooks.items()})


def _spare_hooks(node: Any, tensor: Tensor) -> None:
    """Has hooks on the tensor called in this pass only if another node has a gradient for it."""
    wrap_hooks(_torch.hooks_of(tensor), lambda hook: lambda grad: None if grad is None else hook(grad))
    if hooks := _torch.hooks_after_accumulation_of(tensor):
        has_come: list[bool] = []
        handle = node.register_prehook(lambda grads: has_come.append(grads[0] is not None))
        running_pass().on_end(lambda ok: handle.remove())
        wrap_hooks(hooks, lambda hook: lambda tensor: hook(tensor) if has_come[-1] else None)
