"""The gradients of a bucket of parameters: how they are flattened, what carries them, on which streams they travel.

An edge of the graph carries an *envelope* with those of a whole bucket. A sum waits for the slowest slot: on the
computing streams it would stop every device until then, so sums are made on side streams. docs/design.rst has the rules
of streams and memory.
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
# engine orders streams for it, and thereby for its contents, which were made before it. It does not see the contents:
# it would apply ``record_stream`` to gradients that change streams, and their memory could not be used again until the
# host looks. `GradientStreams` holds the contents instead.


def empty_handle(device: torch.device) -> Tensor:
    """An empty tensor: a handle in a forward, whose gradient in backward is an envelope."""
    return torch.empty(0, dtype=torch.float32, device=device)


def enveloped(contents: Any, device: torch.device) -> Tensor:
    """An envelope with these contents."""
    envelope = empty_handle(device)
    envelope.contents = contents  # type: ignore[attr-defined]
    return envelope


def contents_of(envelope: Tensor | None) -> Any:
    """Takes the contents out of an envelope; ``None`` for ``None``.

    Raises:
        RuntimeError: a hook has changed or replaced the envelope, and its contents are not what the hook meant.
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
    """How the gradients of one bucket are flattened. All slots share one object. For arguments see `broadcast_bucket`.

    Attributes:
        planned: how the bucket's parameters themselves travel, if they do.
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
            if any(bucket.keeps_repeats for bucket in buckets):  # gradients have none
                buckets, _ = plan_buckets(tensors, sys.maxsize, keep_repeats=False)
            for bucket in buckets:  # one, or none
                self._layouts = dict(sorted(zip(bucket.indices, bucket.layouts, strict=True)))
                self._whole = self._buckets[tuple(self._layouts)] = bucket

    def bucket_of(self, grads: Sequence[Tensor | None]) -> Bucket | None:
        """The gradients that travel as one buffer, if any. The same positions give the same object on all slots."""
        if not self._layouts or torch.is_grad_enabled() or (self._may_flatten is not None and not self._may_flatten()):
            return None
        if {*map(type, grads)} == _PLAIN and {*map(_layout, grads)} == _STRIDED:
            return self._whole
        positions = tuple([i for i in self._layouts if _is_plain(grads[i])])
        if not positions:
            return None
        bucket = self._buckets.get(positions)
        if bucket is None:
            # Threads of several devices may make one at the same time; all of them get the one that was stored first.
            made = Bucket.of([(i, self._layouts[i]) for i in positions])
            bucket = self._buckets.setdefault(positions, made)
        return bucket


_PLAIN, _STRIDED = {Tensor}, {torch.strided}
_layout = attrgetter("layout")


def _is_plain(grad: Tensor | None) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided


class SlotGradients:
    """One slot's gradients of a bucket: ``flat`` holds those of ``bucket`` in one buffer, ``others`` the rest.

    ``others`` is by position in the bucket. Without ``bucket`` nothing is flattened. ``made`` is ``None`` where the
    gradients are on the stream that reads them.
    """

    __slots__ = ("bucket", "count", "flat", "made", "others")

    def __init__(self, grads: Sequence[Tensor | None], bucket: Bucket | None = None) -> None:
        self.count = len(grads)
        self.bucket = bucket
        self.made: Made | None = None
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
        """True if there is no gradient."""
        return self.flat is None and not self.others

    def receive_flat(self) -> None:
        """Makes the current stream of the slot's device wait for ``flat``, and calls ``record_stream`` on it."""
        if self.made is not None and self.flat is not None:
            self.made.receive([self.flat])

    def receive_others(self) -> None:
        """As `receive_flat`, for ``others``."""
        if self.made is not None:
            self.made.receive(self.others.values())

    def unflattened(self) -> SlotGradients:
        """The same gradients without a flat buffer."""
        found = SlotGradients(self.as_list())
        found.made = self.made
        return found

    def as_list(self) -> list[Tensor | None]:
        """The gradients by position, taken out of the flat buffer."""
        grads: list[Tensor | None] = [None] * self.count
        for i, grad in self.others.items():
            grads[i] = grad
        if self.bucket is not None and self.flat is not None:
            for i, grad in zip(self.bucket.indices, unflatten(self.bucket, self.flat), strict=True):
                grads[i] = grad
        return grads


class SourceGradients:
    """The source's gradients of a bucket. They can be taken once.

    If ``streams`` is not ``None``, a side stream may still write to them, and their memory belongs to the computing
    stream. So whoever drops them unused makes the computing stream wait.

    Attributes:
        bucket, flat: gradients that are parts of one flat buffer, and that buffer, if there is one.
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
    def on_side_streams(self) -> Sequence[Tensor | None]:
        """The gradients, for who uses them where they are made. They can still be taken."""
        return self._grads

    def take(self) -> Sequence[Tensor | None]:
        """The gradients. The computing stream has to wait for the side stream before it uses or frees them."""
        self._streams = None
        return self._grads

    def __del__(self) -> None:
        if self._streams is not None:
            self._streams.release_sum(self._device)


# ---- streams ---------------------------------------------------------------------------------------------------------

_BUCKETS_HELD = 2
"""How many buckets have their flat buffers held. When one more bucket has been launched, the computing streams wait for
the oldest bucket's sum, except on the root, and its buffers are freed."""


class Made(Event):
    """The stream that made certain tensors, and an event after it did. Made when that work has been launched."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__(stream)
        self.stream = stream

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Makes the current stream of that device wait for the tensors, and calls ``record_stream`` on their memory."""
        here = torch.accelerator.current_stream(self.stream.device)
        if here == self.stream:
            return
        self.make_wait(here)
        for tensor in tensors:
            for memory in memory_of(tensor):
                memory.record_stream(here)


class GradientStreams:
    """The streams that all buckets of one forward share, and the memory that each backward uses on them.

    Attributes:
        computing: for each accelerator of the call, the stream on which it computes.
        sides: for each of them, the side stream of one bucket; see `of_bucket`.
    """

    def __init__(self, computing: dict[torch.device, torch.Stream]) -> None:
        self.computing = computing
        self.sides = {device: kept_stream(device, "gradients") for device in computing}
        self._key = object()  # of the buffers that a pass holds

    @classmethod
    def for_forward(
        cls, slots: Sequence[torch.device], computing: dict[torch.device, torch.Stream]
    ) -> GradientStreams | None:
        """The streams for a forward on ``slots``; ``None`` where gradients stay on the stream that computes them."""
        return cls(computing) if run_apart(slots) else None

    def of_bucket(self, number: int) -> GradientStreams:
        """The same streams, with the side streams of this bucket.

        Buckets take turns on a few: a sum ends at the root, so on one stream the next one would begin there only when
        it has ended, although most links are free by then.
        """
        found = copy.copy(self)  # the buffers that passes hold are shared
        found.sides = {device: kept_stream(device, "gradients", number) for device in self.computing}
        return found

    @contextmanager
    def side_streams_set(self, buffers: Sequence[Tensor], made: Sequence[Made]) -> Iterator[None]:
        """Makes the side streams current inside the block, where work may use ``buffers``.

        Called in the backward of a node, with the computing streams current.

        Args:
            buffers: the slots' flat buffers, then the memory of the sum, on the root's device. That is the first
                buffer, or has just been allocated: the computing stream may still do earlier work that uses it.
            made: for each slot's buffer, when it was made. The side streams wait for these events first, not for what
                the slots have launched since.
        """
        *flats, total = buffers
        root = total.device
        held = running_pass().get(self._key, self._held_by)
        for of_flat in made:
            of_flat.make_wait(self.sides[of_flat.stream.device])
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
            self._record(flats, total, made)
            held.hold([flat for flat in flats if flat is not total], root, self.sides)

    def _record(self, flats: Sequence[Tensor], total: Tensor, made: Sequence[Made]) -> None:
        """Calls ``record_stream`` on buffers whose stream does not wait before they are freed.

        They are those of further slots on the root's device, where the computing stream must not wait for the sum, and
        those that another stream than the computing one has made. All others are held: see `_HeldBuffers`.
        """
        for flat, of_flat in zip(flats, made, strict=True):
            is_of_another = of_flat.stream != self.computing[flat.device]
            if is_of_another or (flat.device == total.device and flat is not total):
                flat.record_stream(self.sides[flat.device])
            if is_of_another and flat is total:  # if the root's slot has no gradient
                flat.record_stream(self.computing[flat.device])

    def release_sum(self, root: torch.device) -> None:
        """Makes the root's computing stream wait for its side stream, so that memory that is written there is free."""
        Event(self.sides[root]).make_wait(self.computing[root])

    def _held_by(self, running: PassOfBackward) -> _HeldBuffers:
        held = _HeldBuffers(self.computing)
        running.on_end(held.release)
        return held


class _HeldBuffers:
    """The buffers that one pass holds. Its buckets are launched one after the other, in the root's thread.

    ``record_stream`` would hold the buffers of a whole step: such memory is free only when the host looks again, and by
    then the host may have launched all of it.
    """

    def __init__(self, computing: Mapping[torch.device, torch.Stream]) -> None:
        self._computing = computing
        # The buffers of each bucket, and for each side stream an event after the last work that uses them.
        self._held: deque[tuple[Sequence[Tensor], list[tuple[torch.device, Event]]]] = deque()

    def hold(self, buffers: Sequence[Tensor], root: torch.device, sides: Mapping[torch.device, torch.Stream]) -> None:
        """Holds a bucket's buffers, once the work that uses them has been launched on ``sides``."""
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
