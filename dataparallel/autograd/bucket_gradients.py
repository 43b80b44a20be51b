"""`SlotGradients`, `SourceGradients` and `GradientStreams`: a bucket's gradients on one slot, their sums, the streams.

An edge of the graph carries an *envelope* with the gradients of a whole bucket. A sum waits for the slowest slot. On
the computing streams it would stop every device until then, so side streams add. docs/design.rst has the rules of
streams and memory.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm.buckets import Bucket, FlatLayout, Planned, flatten, plan_buckets, unflatten
from dataparallel.comm.streams.current import Event, kept_stream, make_current, memory_of, run_apart

# ---- envelopes -------------------------------------------------------------------------------------------------------

# An envelope is an empty tensor that autograd takes for the gradient, with its contents in a Python attribute. The
# engine orders streams for the envelope, and thereby for its contents, which were made before. The engine does not see
# the contents: it would call ``record_stream`` on gradients that change streams, and their memory could not be used
# again until the host looks. `GradientStreams` holds the contents instead.


def empty_handle(device: torch.device) -> Tensor:
    """An empty tensor, which a forward returns as a handle. In backward the handle's gradient is an envelope."""
    return torch.empty(0, dtype=torch.float32, device=device)


def envelope_with(contents: Any, device: torch.device) -> Tensor:
    """An envelope with these contents."""
    envelope = empty_handle(device)
    envelope.contents = contents  # type: ignore[attr-defined]
    return envelope


def take_contents(envelope: Tensor | None) -> Any:
    """Takes the contents out of an envelope; ``None`` for ``None``.

    Raises:
        RuntimeError: a hook has changed or replaced the envelope, which does not change the contents.
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


# ---- gradients of a slot and of the source ---------------------------------------------------------------------------


class Packing:
    """Chooses which gradients of one bucket are flattened, for all slots. For arguments see `broadcast_bucket`.

    Attributes:
        planned: the plan by which the bucket's parameters travel as a flat buffer; ``None`` if they do not.
    """

    def __init__(
        self, slots: Sequence[torch.device], tensors: Sequence[Tensor], may_flatten: Callable[[], bool] | None
    ) -> None:
        self._may_flatten = may_flatten
        self._layouts: dict[int, FlatLayout] = {}
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self.planned: Planned | None = None
        if comm.sums_travel_flat(slots, tensors):
            self.planned = plan_buckets(tensors, sys.maxsize)
            buckets, _ = self.planned
            if any(bucket.keeps_repeats for bucket in buckets):  # gradients have no repeated elements
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
        """True if there is no gradient."""
        return self.flat is None and not self.separate

    def receive_flat(self) -> None:
        """Makes the current stream of the slot's device wait for ``flat``, and calls ``record_stream`` on it."""
        if self.ready_event is not None and self.flat is not None:
            self.ready_event.receive([self.flat])

    def receive_separate(self) -> None:
        """As `receive_flat`, for ``separate``."""
        if self.ready_event is not None:
            self.ready_event.receive(self.separate.values())

    def without_flat(self) -> SlotGradients:
        """The same gradients without a flat buffer."""
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
        held = running_pass().get(self._key, self._hold_until_end)
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
            self._record_other_streams(flats, total, ready_events)
            held.hold([flat for flat in flats if flat is not total], root, self.sides)

    def _record_other_streams(self, flats: Sequence[Tensor], total: Tensor, ready_events: Sequence[ReadyEvent]) -> None:
        """Calls ``record_stream`` on buffers whose stream does not wait before they are freed.

        These are buffers of further slots on the root's device, where the computing stream must not wait for the sum,
        and buffers that another stream than the computing one has made. `_HeldBuffers` holds all other buffers.
        """
        for flat, ready in zip(flats, ready_events, strict=True):
            is_foreign = ready.stream != self.computing[flat.device]
            if is_foreign or (flat.device == total.device and flat is not total):
                flat.record_stream(self.sides[flat.device])
            if is_foreign and flat is total:  # if the root's slot has no gradient
                flat.record_stream(self.computing[flat.device])

    def release_sum(self, root: torch.device) -> None:
        """Makes the root's computing stream wait for its side stream, which may write to the memory of the sum."""
        Event(self.sides[root]).make_wait(self.computing[root])

    def _hold_until_end(self, running: PassOfBackward) -> _HeldBuffers:
        held = _HeldBuffers(self.computing)
        running.on_end(held.release)
        return held


class _HeldBuffers:
    """The flat buffers that one backward pass holds. The root's thread launches buckets one after the other.

    ``record_stream`` would keep the buffers of a whole step: such memory is free only when the host looks again, and by
    then the host may have launched the whole step.
    """

    def __init__(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        self._computing = computing
        # The buffers of each bucket, and an event on each side stream after the last work that uses the buffers.
        self._held: deque[tuple[Sequence[Tensor], list[tuple[torch.device, Event]]]] = deque()

    def hold(self, buffers: Sequence[Tensor], root: torch.device, sides: Mapping[torch.device, torch.Stream]) -> None:
        """Holds a bucket's buffers. The work that uses them has been launched on ``sides``."""
        devices = {buffer.device for buffer in buffers} - {root}
        self._held.append((buffers, [(device, Event(sides[device])) for device in devices]))
        if len(self._held) > _BUCKETS_HELD:
            self._release_oldest()

    def release(self, ok: bool) -> None:
        """Makes the computing streams wait for the side streams, except on the root, and releases all buffers."""
        while self._held:
            self._release_oldest()

    def _release_oldest(self) -> None:
        buffers, events = self._held.popleft()
        for device, event in events:
            event.make_wait(self._computing[device])
        del buffers  # only now: the computing stream may use the memory again
