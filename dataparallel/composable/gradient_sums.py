"""Gradients of living replicas: summed into the source during backward, or kept on the slots until they are.

A bucket of parameters is one kept `PersistentToSlots` node. Its backward runs once in each pass, when the last slot has
the bucket's gradients, and asks for each parameter whether the pass writes its ``.grad``: ``backward(inputs=...)`` may
write some of a bucket.

- Where gradients are summed, a parameter whose ``.grad`` is written gets the sum and what is kept for it. What is kept
  for the others is added when the pass ends, so that then every ``.grad`` is that of one device.
- Where they are not, it gets slot 0's gradient, so that ``.grad`` is what that slot has found so far, and those of the
  other slots are kept. What is kept for the others stays.
- A pass that writes no ``.grad`` (``torch.autograd.grad``) gets the sum of its own gradients. What is kept stays.
- A pass that is recorded gets sums in any case, and what is kept for the parameters that it reaches: it does not add
  to ``.grad`` in place, but puts another tensor there.

What is kept is void, and dropped, if the source's ``.grad`` says so: it is ``None``, another tensor, or has been set to
zero. ``composable.persistent_tensors`` makes the nodes; how gradients travel is the business of ``functions`` and
``comm``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence, Set
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_gradients import SlotGradients
from dataparallel.autograd.bucket_nodes import ToSlots
from dataparallel.streams.current import streams_joined
from dataparallel.streams.gradients import GradientStreams
from dataparallel.streams.nodes import forward_streams_set

__all__ = ["GradientSums", "PersistentToSlots", "WaitingBucket"]


class PersistentToSlots(ToSlots):
    """The node of a bucket that serves many passes. ``node.waiting`` is its `WaitingBucket`.

    It takes a token too, and its last output is one: the next bucket's is this one's output, so that in every pass
    a bucket's sum is launched before those of the buckets that have its token. What is to follow the sums, on other
    machines, is in the same order everywhere then, whatever order gradients come in.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, slots: Sequence[torch.device], gradient_streams: GradientStreams | None, handle: Tensor, token: Tensor
    ) -> tuple[Tensor, ...]:
        """As `ToSlots`'s, and the token."""
        return (*ToSlots.forward(ctx, slots, gradient_streams, handle), token.detach())

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        """Sums over the slots, or slot 0's gradients."""
        waiting: WaitingBucket = ctx.waiting
        reached, written = _what_is_reached(ctx, waiting.sources)
        with forward_streams_set(ctx, ()):  # as in `ToSlots`
            brought = ToSlots.brought(ctx, envelopes[:-1])
            if not reached:  # the node runs for the sake of the order
                return None, None, None, None
            if written:
                if waiting.may_keep and not torch.is_grad_enabled():
                    return None, None, ToSlots.handed_on(ctx, waiting.keep(brought, written)), None
                brought = [*waiting.with_kept(brought, written)]
            return None, None, ToSlots.summed(ctx, brought), None


def _what_is_reached(node: Any, sources: Sequence[Tensor]) -> tuple[bool, set[int]]:
    """Whether the running pass goes on behind a bucket's node, and the positions of sources whose ``.grad`` it writes.

    Those are leaves. Of a buffer that was computed gradients go on to what it was computed from.
    """
    from_source = next(following for following, _ in node.next_functions if following is not None)
    reached, written = False, set()
    for position, (following, _) in enumerate(from_source.next_functions):
        try:
            if not _torch.will_engine_execute_node(following):
                continue
            if sources[position].is_leaf:
                written.add(position)
        except RuntimeError:  # torch's answer for a leaf whose gradient `torch.autograd.grad` is to return
            pass
        reached = True
    return reached, written


class GradientSums:
    """What the buckets of one module have in common.

    Attributes:
        are_on: whether a pass sums gradients, or keeps them on the slots.
    """

    def __init__(self) -> None:
        self.are_on = True
        # Weakly: they know this object, and belong to their nodes.
        self._buckets: list[weakref.ref[WaitingBucket]] = []
        # Numbers of passes that end with `add_what_is_kept`; one that fails leaves its number behind.
        self._ending: deque[int] = deque(maxlen=64)

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

    def add_when_the_pass_ends(self) -> None:
        """Has `add_what_is_kept` called once, however many buckets of the running pass ask for it."""
        number = _torch.current_graph_task_id()
        if number not in self._ending:
            self._ending.append(number)
            _torch.queue_callback(self.add_what_is_kept)

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

    def __init__(self, bucket: WaitingBucket, written: set[int]) -> None:
        self._bucket, self.written = bucket, written

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
        # A buffer that was computed has no ``.grad`` to wait for.
        self._has_leaves_only = all(source.is_leaf for source in sources)
        self._streams = streams
        self._kept: dict[tuple[int, int], Tensor] = {}  # by slot and source
        self._marks: dict[int, _Mark] = {}  # by source
        # Several at a time where reentrant checkpoints nest them, one for each slot.
        self._under_way: weakref.WeakSet[_EndOfPass] = weakref.WeakSet()

    @property
    def may_keep(self) -> bool:
        """Whether a pass that writes ``.grad`` is to keep gradients here."""
        return self.is_in_use and self._has_leaves_only and not self.sums.are_on

    def keep(self, brought: Sequence[SlotGradients | None], written: set[int]) -> list[Tensor | None]:
        """Keeps the gradients of all slots but the first; returns the first one's, for the source.

        Only of sources that are ``written``. Where only other slots have one the source gets zeros, so that its
        ``.grad`` shows that there is something.
        """
        self.drop_what_is_void()
        first, *others = self._listed(brought)
        for slot, grads in enumerate(others, start=1):
            for source in written:
                grad = grads[source]
                if grad is None:
                    continue
                # What was there before, until the pass ends: if it fails, a former gradient decides, and without one
                # these are void.
                self._marks.setdefault(source, _Mark(self.sources[source].grad))
                self._add((slot, source), grad)
                if first[source] is None:
                    first[source] = torch.zeros_like(self.sources[source])
        end = _EndOfPass(self, written)
        self._under_way.add(end)
        _torch.queue_callback(end)
        return [grad if source in written else None for source, grad in enumerate(first)]

    def with_kept(self, brought: Sequence[SlotGradients | None], written: set[int]) -> Sequence[SlotGradients | None]:
        """The gradients of this pass and what is kept for sources that are ``written``, which is so no longer."""
        if self.sums.are_on:
            # What is kept for others, which this pass does not reach, belongs to their ``.grad`` all the same.
            self.sums.add_when_the_pass_ends()
        if not self.is_in_use:
            # After this pass ``.grad`` does not tell the buckets in use what is void, or is another tensor.
            self.sums.drop_what_is_void()
            if self.sums.are_on or torch.is_grad_enabled():
                self.sums.add_what_is_kept()
        self.drop_what_is_void()
        taken = self._take(written)
        if not taken:
            return brought
        together = self._listed(brought)
        for (slot, source), kept in taken.items():
            grad = together[slot][source]
            together[slot][source] = kept if grad is None else kept + grad
        return [*map(SlotGradients, together)]

    def _listed(self, brought: Sequence[SlotGradients | None]) -> list[list[Tensor | None]]:
        return [[None] * len(self.sources) if of_slot is None else of_slot.as_list() for of_slot in brought]

    def drop_what_is_void(self) -> None:
        """See `GradientSums`. Not while a pass adds to ``.grad``, which is no sign then."""
        if not self._under_way:
            self._take({source for source, mark in [*self._marks.items()] if mark.is_void(self.sources[source].grad)})

    @torch.no_grad()
    def add_what_is_kept(self) -> None:
        """See `GradientSums`."""
        if not self._kept:
            return
        self.drop_what_is_void()
        terms: dict[int, list[Tensor]] = defaultdict(list)
        taken = self._take({source for _, source in [*self._kept]})
        for (_, source), kept in sorted(taken.items(), key=itemgetter(0)):
            terms[source].append(kept)
        # On the streams of the forward, where kept gradients were made; ``.grad`` may have been written on others.
        with streams_joined(self._streams):
            for source, of_source in terms.items():
                parameter = self.sources[source]
                if parameter.grad is not None:  # else void: a pass has failed, which the engine has yet to drop
                    parameter.grad.add_(comm.reduce_add(of_source, parameter.device))

    def end_pass(self, end: _EndOfPass) -> None:
        """From here on ``.grad`` is what belongs to the kept gradients, where the pass has written it."""
        self._under_way.discard(end)
        for source in end.written & self._marks.keys():
            grad = self.sources[source].grad
            if grad is not None:
                self._marks[source] = _Mark(grad)

    def _add(self, key: tuple[int, int], grad: Tensor) -> None:
        """Adds to what is kept. Each step is atomic: passes in several threads may add and take at a time."""
        while True:
            kept = self._kept.pop(key, None)
            if kept is not None:
                grad = kept + grad
            if self._kept.setdefault(key, grad) is grad:
                return

    def _take(self, sources: Set[int]) -> dict[tuple[int, int], Tensor]:
        """What is kept for ``sources``, by slot and source; nobody else gets it too."""
        taken = {}
        for key in [*self._kept]:
            if key[1] in sources and (kept := self._kept.pop(key, None)) is not None:
                taken[key] = kept
        for source in sources:
            self._marks.pop(source, None)
        return taken
