"""Gradients of living replicas: summed into the source during backward, or kept on the slots until they are.

A bucket of parameters is one kept `LivingToSlots` node, whose backward runs once in each pass, when the last slot has
the bucket's gradients. Where gradients are not to be summed it hands slot 0's on, so that the source's ``.grad`` is
what that slot has found so far, and keeps those of the others. The next sum includes them, unless the source's
``.grad`` says that they are void: it is ``None``, another tensor, or has been set to zero. ``living_tensors`` makes the
nodes; how gradients travel is the business of ``functions`` and ``comm``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.bucket_nodes import SlotGradients, ToSlots
from dataparallel.side_streams import BesideBackward
from dataparallel.streams import current

__all__ = ["GradientSums", "LivingToSlots", "WaitingBucket"]


class LivingToSlots(ToSlots):
    """The node of a bucket that serves many passes. ``node.waiting`` is its `WaitingBucket`.

    It takes a token too, and its last output is one: the next bucket's is this one's output, so that in every pass
    a bucket's sum is launched before those of the buckets that have its token. What is to follow the sums, on other
    machines, is in the same order everywhere then, whatever order gradients come in.

    Passes that write no ``.grad`` (``torch.autograd.grad``) or that are themselves recorded get the sum of their own
    gradients; nothing is kept of them, and what is kept stays.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, slots: Sequence[torch.device], beside: BesideBackward | None, handle: Tensor, token: Tensor
    ) -> tuple[Tensor, ...]:
        """As `ToSlots`'s, and the token."""
        return (*ToSlots.forward(ctx, slots, beside, handle), token.detach())

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        """Sums over the slots, or slot 0's gradients."""
        waiting: WaitingBucket = ctx.waiting
        with current(ctx.streams):
            brought = ToSlots.brought(ctx, envelopes[:-1])
            if not torch.is_grad_enabled() and _writes_grad(ctx):
                if waiting.is_in_use and not waiting.sums.are_on:
                    return None, None, ToSlots.handed_on(ctx, waiting.keep(brought)), None
                brought = [*waiting.with_kept(brought)]
            return None, None, ToSlots.summed(ctx, brought), None


def _writes_grad(node: Any) -> bool:
    """Whether the running pass accumulates into ``.grad``; in others torch has no answer for such nodes."""
    accumulation = _first_after(_first_after(node))
    try:
        return bool(_torch.will_engine_execute_node(accumulation))
    except RuntimeError:
        return False


def _first_after(node: Any) -> Any:
    return next(following for following, _ in node.next_functions if following is not None)


class GradientSums:
    """What the buckets of one module have in common.

    Attributes:
        are_on: whether a pass sums gradients, or keeps them on the slots.
    """

    def __init__(self) -> None:
        self.are_on = True
        # Weakly: they know this object, and belong to their nodes.
        self._buckets: list[weakref.ref[WaitingBucket]] = []

    @property
    def buckets(self) -> list[WaitingBucket]:
        """Those whose nodes still exist."""
        return [bucket for found in self._buckets if (bucket := found()) is not None]

    def use(self, buckets: Sequence[WaitingBucket]) -> None:
        """From here on these are the buckets. Graphs over others may still be waiting for their backward."""
        for former in self.buckets:
            former.is_in_use = False
        for bucket in buckets:
            bucket.is_in_use = True
        self._buckets = [*map(weakref.ref, buckets)]

    def add_what_is_kept(self) -> None:
        """Adds gradients that no pass has summed to the source's ``.grad``, where they are not void."""
        for bucket in self.buckets:
            bucket.add_what_is_kept()

    def drop_what_is_void(self) -> None:
        """Frees kept gradients that the source's ``.grad`` says are void."""
        for bucket in self.buckets:
            bucket.drop_what_is_void()


class _Mark:
    """What a source's ``.grad`` was when gradients that belong to it were kept elsewhere."""

    def __init__(self, grad: Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else _torch.version_of(grad)

    def is_void(self, grad: Tensor | None) -> bool:
        """Whether ``grad`` has been thrown away or set to zero since. Other passes may have added to it."""
        if grad is None or self._grad is None or self._grad() is not grad:
            return True
        return _torch.version_of(grad) != self._version and not bool(grad.any())


class _EndOfPass:
    """Called when a pass that keeps gradients ends. The engine alone holds it: one that has failed drops it."""

    def __init__(self, bucket: WaitingBucket) -> None:
        self._bucket = bucket

    def __call__(self) -> None:
        self._bucket.end_pass(self)


class WaitingBucket:
    """The gradients of one bucket's parameters that wait on the slots.

    Attributes:
        is_in_use: whether the next forward has this bucket; of others nothing is kept, since nobody would ask for it.
    """

    def __init__(self, sums: GradientSums, sources: Sequence[Tensor], streams: Any) -> None:
        self.sums = sums
        self.sources = list(sources)
        self.is_in_use = False
        self._streams = streams
        self._kept: dict[tuple[int, int], Tensor] = {}  # by slot and source
        self._marks: dict[int, _Mark] = {}  # by source
        # Several at a time where reentrant checkpoints nest them, one for each slot.
        self._under_way: weakref.WeakSet[_EndOfPass] = weakref.WeakSet()

    def keep(self, brought: Sequence[SlotGradients | None]) -> list[Tensor | None]:
        """Keeps the gradients of all slots but the first; returns the first one's, for the source.

        Where only other slots have one the source gets zeros, so that its ``.grad`` shows that there is something.
        """
        self.drop_what_is_void()
        first, *others = self._listed(brought)
        for slot, grads in enumerate(others, start=1):
            for source, grad in enumerate(grads):
                if grad is None:
                    continue
                kept = self._kept.get((slot, source))
                self._kept[slot, source] = grad if kept is None else kept + grad
                # What was there before, until the pass ends: if it fails, a former gradient decides, and without one
                # these are void.
                self._marks.setdefault(source, _Mark(self.sources[source].grad))
                if first[source] is None:
                    first[source] = torch.zeros_like(self.sources[source])
        end = _EndOfPass(self)
        self._under_way.add(end)
        _torch.queue_callback(end)
        return first

    def with_kept(self, brought: Sequence[SlotGradients | None]) -> Sequence[SlotGradients | None]:
        """The gradients of this pass and what is kept, which is so no longer."""
        # What other buckets keep that this pass does not reach belongs to the sum all the same.
        _torch.queue_callback(self.sums.add_what_is_kept)
        if not self._kept:
            return brought
        self.drop_what_is_void()
        together = self._listed(brought)
        for (slot, source), kept in self._kept.items():
            grad = together[slot][source]
            together[slot][source] = kept if grad is None else kept + grad
        self._forget()
        return [*map(SlotGradients, together)]

    def _listed(self, brought: Sequence[SlotGradients | None]) -> list[list[Tensor | None]]:
        return [[None] * len(self.sources) if of_slot is None else of_slot.each() for of_slot in brought]

    def drop_what_is_void(self) -> None:
        """See `GradientSums`. Not while a pass adds to ``.grad``, which is no sign then."""
        if self._under_way:
            return
        void = {source for source, mark in self._marks.items() if mark.is_void(self.sources[source].grad)}
        if void:
            self._kept = {key: kept for key, kept in self._kept.items() if key[1] not in void}
            for source in void:
                del self._marks[source]

    @torch.no_grad()
    def add_what_is_kept(self) -> None:
        """See `GradientSums`."""
        if not self._kept:
            return
        self.drop_what_is_void()
        with current(self._streams):
            for source in {source for _, source in self._kept}:
                terms = [kept for (_, of), kept in sorted(self._kept.items(), key=lambda item: item[0]) if of == source]
                parameter = self.sources[source]
                if parameter.grad is None:  # void, after a pass that has failed and that the engine has yet to drop
                    continue
                parameter.grad.add_(comm.reduce_add(terms, parameter.device))
        self._forget()

    def end_pass(self, end: _EndOfPass) -> None:
        """From here on ``.grad`` is what belongs to the kept gradients."""
        self._under_way.discard(end)
        for _, source in self._kept:
            grad = self.sources[source].grad
            if grad is not None:
                self._marks[source] = _Mark(grad)

    def _forget(self) -> None:
        self._kept, self._marks = {}, {}
