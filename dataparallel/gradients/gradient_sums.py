"""Gradients of persistent replicas: summed into the source during backward, or kept on the slots until a later one.

Each bucket of parameters has one `PersistentToSlots` node that many passes use, and a `WaitingBucket`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence, Set
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_gradients import SlotGradients
from dataparallel.autograd.bucket_nodes import ToSlots
from dataparallel.autograd.gradient_streams import GradientStreams, Made
from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm.streams.current import streams_joined, streams_set


class PersistentToSlots(ToSlots):
    """A bucket's node, used by many passes. ``node.waiting`` is its `WaitingBucket`.

    Its backward runs once in each pass, when the last slot has the bucket's gradients. Its last input is a token: the
    last output of the node that was made before it. So the engine runs this node before that one, and every pass
    launches sums in the same order, whatever the order in which gradients arrive. Collectives with other machines,
    which are to follow the sums, need one order everywhere.

    Which of the bucket's parameters get a ``.grad`` in this pass is asked of the engine, because
    ``backward(inputs=...)`` may write only some of them.

    - If sums are on, a parameter whose ``.grad`` is written gets the sum and the gradients that are kept for it.
      Gradients that are kept for other parameters are added at the end of the pass, so that every ``.grad`` is that of
      one device.
    - If sums are off, it gets slot 0's gradient, and the gradients of the other slots are kept. Those that are kept for
      other parameters stay.
    - A pass that writes no ``.grad`` (``torch.autograd.grad``) gets the sum of its own gradients. Kept gradients stay.
    - A pass that is recorded always gets sums, and the gradients that are kept for the parameters that it reaches: it
      does not add to ``.grad`` in place, but puts another tensor there.

    The user may throw gradients away. So kept gradients are void, and dropped, if the source's ``.grad`` is ``None``,
    is another tensor, or has been set to zero.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, slots: Sequence[torch.device], gradient_streams: GradientStreams | None, handle: Tensor, token: Tensor
    ) -> tuple[Tensor, ...]:
        """As that of `ToSlots`; the token is passed on."""
        return (*ToSlots.forward(ctx, slots, gradient_streams, handle), token.detach())

    @staticmethod
    def backward(ctx: Any, *envelopes: Tensor | None) -> tuple[Any, ...]:
        """The sums over the slots, or slot 0's gradients."""
        waiting: WaitingBucket = ctx.waiting
        from_source = next(following for following, _ in ctx.next_functions if following is not None)
        reached, written = reached_sources(from_source, waiting.sources)
        by_slot = ToSlots.brought(envelopes[:-1])
        if not reached:  # only the order of the nodes makes the engine run this one
            return None, None, None, None
        with ToSlots.computing_streams_set(ctx):
            if written:
                if waiting.may_keep and not torch.is_grad_enabled():
                    return None, None, ToSlots.handed_on(ctx, waiting.keep(by_slot, written)), None
                taken = waiting.take_kept(written)
                if taken:
                    with ToSlots.adding_streams_set(ctx):
                        by_slot = waiting.added(by_slot, taken)
            return None, None, ToSlots.summed(ctx, by_slot), None


def reached_sources(from_source: Any, sources: Sequence[Tensor]) -> tuple[bool, set[int]]:
    """True if the running pass goes on behind a bucket's node; and positions of the sources whose ``.grad`` it writes.

    These sources are leaves. A buffer may be the result of a computation: its gradient goes on into that graph.
    ``from_source`` is the bucket's `FromSource` node.
    """
    reached, written = False, set()
    for position, (following, _) in enumerate(from_source.next_functions):
        try:
            if not _torch.will_engine_execute_node(following):
                continue
            if sources[position].is_leaf:
                written.add(position)
        except RuntimeError:  # torch raises it for a leaf whose gradient `torch.autograd.grad` is to return
            pass
        reached = True
    return reached, written


class GradientSums:
    """The buckets of one module, and the switch of their sums.

    Attributes:
        are_on: if true, a pass sums gradients, else it keeps them on the slots.
    """

    def __init__(self) -> None:
        self.are_on = True
        # Weak references: a bucket belongs to its node, and refers to this object.
        self._buckets: list[weakref.ref[WaitingBucket]] = []

    @property
    def buckets(self) -> list[WaitingBucket]:
        """The buckets whose nodes still exist."""
        return [bucket for found in self._buckets if (bucket := found()) is not None]

    def use(self, buckets: Sequence[WaitingBucket]) -> None:
        """Replaces the buckets. Graphs over the former ones may still wait for their backward."""
        for former in self.buckets:
            former.is_in_use = False
        for bucket in buckets:
            bucket.is_in_use = True
        self._buckets = [*map(weakref.ref, buckets)]

    def add_kept(self) -> None:
        """Adds kept gradients to the source's ``.grad``, except void ones."""
        for bucket in self.buckets:
            bucket.add_kept()

    def drop_void(self) -> None:
        """Frees kept gradients that are void."""
        for bucket in self.buckets:
            bucket.drop_void()


class Kept(NamedTuple):
    """A kept gradient. ``made`` is as in `SlotGradients`."""

    grad: Tensor
    made: Made | None

    def received(self) -> Tensor:
        """The gradient, ready for the current stream of its device."""
        if self.made is not None:
            self.made.receive([self.grad])
        return self.grad


class FormerGrad:
    """A source's ``.grad`` and its version, as they were when gradients were kept for it."""

    def __init__(self, grad: Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else _torch.version_of(grad)

    def is_void(self, grad: Tensor | None) -> bool:
        """True if the source's current ``grad`` is another one or has been set to zero. Passes may have added to it."""
        if grad is None or self._grad is None or self._grad() is not grad:
            return True
        return _torch.version_of(grad) != self._version and not bool(grad.any())


class WaitingBucket:
    """The kept gradients of one bucket.

    Attributes:
        is_in_use: true if the next forward uses this bucket. Others keep no gradients: no later pass would add them.
        has_leaves_only: false if a source is the result of a computation, as a buffer may be. It has no ``.grad``.
    """

    def __init__(
        self, sums: GradientSums, sources: Sequence[Tensor], streams: dict[torch.device, torch.Stream]
    ) -> None:
        self.sums = sums
        self.sources = list(sources)
        self.is_in_use = False
        self.has_leaves_only = all(source.is_leaf for source in sources)
        self._streams = streams
        self._kept: dict[tuple[int, int], Kept] = {}  # by slot and source
        self._former: dict[int, FormerGrad] = {}  # by source
        # Those that keep gradients here and have not ended: several, if reentrant checkpoints nest one on each slot.
        self._under_way: set[PassOfBackward] = set()

    @property
    def may_keep(self) -> bool:
        """True if a pass that writes ``.grad`` keeps gradients here."""
        return self.is_in_use and self.has_leaves_only and not self.sums.are_on

    def keep(self, by_slot: Sequence[SlotGradients | None], written: set[int]) -> list[Tensor | None]:
        """Keeps the gradients of all slots but the first for the ``written`` sources; returns the first slot's.

        If only other slots have a gradient, the first one's is zeros: a source's ``.grad`` of ``None`` would say that
        the kept gradients are void.
        """
        grads = self._none() if by_slot[0] is None else by_slot[0].as_list()
        for source in self._keep_of_slots(1, by_slot, written):
            if grads[source] is None:
                grads[source] = torch.zeros_like(self.sources[source])
        return [grad if source in written else None for source, grad in enumerate(grads)]

    def _keep_of_slots(self, first: int, by_slot: Sequence[SlotGradients | None], written: set[int]) -> set[int]:
        """Keeps the gradients of the slots from ``first`` on for the ``written`` sources; returns which have any."""
        self.drop_void()
        found: set[int] = set()
        for slot, of_slot in enumerate(by_slot):
            if slot < first or of_slot is None:
                continue
            grads = of_slot.as_list()
            kept = {source: grad for source in written if (grad := grads[source]) is not None}
            for source in kept:
                # The ``.grad`` from before this pass, until it ends. If the pass fails, kept gradients belong to that
                # one; if there was none, they are void.
                self._former.setdefault(source, FormerGrad(self.sources[source].grad))
            found.update(kept)
            self._add(slot, kept, of_slot.made)
        running = running_pass()
        self._under_way.add(running)
        running.on_end(partial(self.end_pass, running, written))
        return found

    def _none(self) -> list[Tensor | None]:
        return [None] * len(self.sources)

    def take_kept(self, written: set[int]) -> dict[tuple[int, int], Kept]:
        """The gradients that a pass with sums adds to those of the ``written`` sources. They are removed here."""
        sums = self.sums
        if sums.are_on:
            # Gradients that are kept for sources that this pass does not reach belong to their ``.grad`` too.
            running = running_pass()
            if running.is_first((sums, "add_kept")):
                running.on_end(lambda ok: sums.add_kept() if ok else None)
        if not self.is_in_use:
            # After this pass the buckets in use cannot tell from ``.grad`` what is void: it may be another tensor.
            sums.drop_void()
            if sums.are_on or torch.is_grad_enabled():
                sums.add_kept()
        self.drop_void()
        return self._take(written)

    def added(
        self, by_slot: Sequence[SlotGradients | None], taken: dict[tuple[int, int], Kept]
    ) -> list[SlotGradients | None]:
        """The gradients of this pass plus kept ones that it has taken, on the current streams."""
        lists = []
        for of_slot in by_slot:
            unflattened = None if of_slot is None else of_slot.unflattened()
            if unflattened is not None:
                unflattened.receive_others()
            lists.append(self._none() if unflattened is None else unflattened.as_list())
        for (slot, source), kept in taken.items():
            grad = lists[slot][source]
            lists[slot][source] = kept.received() if grad is None else kept.received() + grad
        return [*map(SlotGradients, lists)]

    def drop_void(self) -> None:
        """See `GradientSums`. Does nothing while a pass changes ``.grad``, which tells nothing then."""
        if not self._under_way:
            former = [*self._former.items()]
            self._take({source for source, grad in former if grad.is_void(self.sources[source].grad)})

    @torch.no_grad()
    def add_kept(self) -> None:
        """See `GradientSums`."""
        if not self._kept:
            return
        self.drop_void()
        terms: dict[int, list[Kept]] = defaultdict(list)
        taken = self._take({source for _, source in [*self._kept]})
        for (_, source), kept in sorted(taken.items(), key=itemgetter(0)):
            terms[source].append(kept)
        # Kept gradients were made on the streams of the forward; ``.grad`` may have been written on others.
        with streams_joined(self._streams):
            for source, of_source in terms.items():
                parameter = self.sources[source]
                if parameter.grad is not None:  # else void: the engine still holds a pass that has failed
                    grads = [kept.received() for kept in of_source]
                    parameter.grad.add_(comm.reduce_add(grads, parameter.device))

    def end_pass(self, ended: PassOfBackward, written: set[int], ok: bool) -> None:
        """If the pass has succeeded, kept gradients belong from here on to the ``.grad`` that it has written."""
        self._under_way.discard(ended)
        if not ok:
            return
        for source in written & self._former.keys():
            grad = self.sources[source].grad
            if grad is not None:
                self._former[source] = FormerGrad(grad)

    def _add(self, slot: int, grads: dict[int, Tensor], made: Made | None) -> None:
        """Adds to a slot's kept gradients, by source, on the stream that makes the slot's gradients. Empties ``grads``.

        Each step is atomic: passes in several threads may add and take at the same time.
        """
        while grads:
            former = {source: kept for source in grads if (kept := self._kept.pop((slot, source), None)) is not None}
            if former:
                with streams_set({} if made is None else {made.stream.device: made.stream}):
                    for source, kept in former.items():
                        grads[source] = kept.received() + grads[source]
                made = None if made is None else Made(made.stream)
            for source, grad in [*grads.items()]:
                if self._kept.setdefault((slot, source), kept := Kept(grad, made)) is kept:
                    del grads[source]

    def _take(self, sources: Set[int]) -> dict[tuple[int, int], Kept]:
        """Removes and returns the gradients that are kept for ``sources``, by slot and source."""
        taken = {}
        for key in [*self._kept]:
            if key[1] in sources and (kept := self._kept.pop(key, None)) is not None:
                taken[key] = kept
        for source in sources:
            self._former.pop(source, None)
        return taken
