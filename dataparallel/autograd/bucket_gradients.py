"""The gradients of one bucket of parameters, as they pass along one edge of autograd's graph.

An edge between two nodes of a bucket carries an *envelope*: an empty tensor that autograd takes for the gradient, with
its contents in a Python attribute. The contents are `SlotGradients` on the way from a slot, and `SourceGradients` on
the way to the source. `Packing` says which gradients of a slot are flattened into one buffer.

Envelopes serve two purposes. One edge carries a whole bucket, however many tensors it has. And the engine does not see
the contents: it would apply ``record_stream`` to gradients that change streams, and their memory could not be used
again until the host looks. ``gradient_streams`` holds the contents instead. The engine orders streams for an envelope,
and thereby for its contents, which were made before it.

``bucket_nodes`` has the nodes. Only it and ``gradients.gradient_sums`` use this room.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.gradient_streams import GradientStreams, Made
from dataparallel.comm.buckets import Bucket, Layout, Planned, flatten, plan_buckets, unflatten


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


class Packing:
    """How the gradients of one bucket are flattened. All slots share one object. For arguments see `broadcast_bucket`.

    Attributes:
        planned: how the bucket's parameters themselves travel, if they do.
    """

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
