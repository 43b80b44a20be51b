"""Gradients of persistent replicas: summed into the source during backward, or left on the slots until a later one.

Each bucket of parameters has one `PersistentToSlots` node that many passes use. What waits belongs to the module.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_gradients import GradientStreams, ReadyEvent, SlotGradients
from dataparallel.autograd.bucket_nodes import ToSlots
from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.comm.streams.current import streams_joined, streams_set


class PersistentToSlots(ToSlots):
    """A bucket's node, used by many passes. ``node.bucket`` is its `SourceBucket`.

    Its backward runs once in each pass, when the last slot has the bucket's gradients. Its last input is a token: the
    last output of the node that was made before it. So the engine runs this node before that one, and every pass
    launches sums in the same order, whatever the order in which gradients arrive. Collectives with other machines,
    which are to follow the sums, need one order everywhere.

    Which of the bucket's parameters get a ``.grad`` in this pass is asked of the engine, because
    ``backward(inputs=...)`` may write only some of them.

    - If sums are on, a parameter whose ``.grad`` is written gets the sum and the gradients that wait for it. Gradients
      that wait for other parameters are added at the end of the pass, so that every ``.grad`` is that of one device.
    - If sums are off, it gets slot 0's gradient, and the gradients of the other slots wait. Those that wait for other
      parameters stay.
    - A pass that writes no ``.grad`` (``torch.autograd.grad``) gets the sum of its own gradients. What waits stays.
    - A pass that is recorded always gets sums, and the gradients that wait for the parameters that it reaches: it does
      not add to ``.grad`` in place, but puts another tensor there.

    The user may throw gradients away. So gradients that wait are void, and dropped, if the source's ``.grad`` is
    ``None``, is another tensor, or has been set to zero.
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
        bucket: SourceBucket = ctx.bucket
        from_source = next(following for following, _ in ctx.next_functions if following is not None)
        reached, written = reached_sources(from_source, bucket.sources)
        by_slot = ToSlots.take_gradients(envelopes[:-1])
        if not reached:  # only the order of the nodes makes the engine run this one
            return None, None, None, None
        sums = bucket.sums
        with ToSlots.computing_streams_set(ctx):
            if written:
                if bucket.has_leaves_only and not sums.are_on and not torch.is_grad_enabled():
                    return None, None, ToSlots.envelope_of(ctx, sums.keep(bucket, by_slot, written)), None
                if taken := sums.take(bucket, written):
                    with ToSlots.adding_streams_set(ctx):
                        by_slot = bucket.added(by_slot, taken)
            return None, None, ToSlots.sum_into_envelope(ctx, by_slot), None


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


class SourceBucket:
    """The parameters and buffers of the user's module that are in one bucket.

    Attributes:
        sums: those of the module.
        sources: the tensors.
        streams: the computing streams of the forward that uses the bucket.
        has_leaves_only: false if a buffer is the result of a computation. Such a buffer has no ``.grad``.
    """

    def __init__(
        self, sums: GradientSums, sources: Sequence[Tensor], streams: dict[torch.device, torch.Stream]
    ) -> None:
        self.sums, self.sources, self.streams = sums, list(sources), streams
        self.has_leaves_only = all(source.is_leaf for source in sources)

    def as_lists(self, by_slot: Sequence[SlotGradients | None]) -> list[list[Tensor | None]]:
        """The gradients of each slot, by position."""
        return [[None] * len(self.sources) if of_slot is None else of_slot.as_list() for of_slot in by_slot]

    def added(
        self, by_slot: Sequence[SlotGradients | None], taken: Mapping[tuple[int, int], Kept]
    ) -> list[SlotGradients | None]:
        """The gradients of this pass plus those that `GradientSums.take` has taken, on the current streams."""
        unflattened = [None if of_slot is None else of_slot.without_flat() for of_slot in by_slot]
        for of_slot in unflattened:
            if of_slot is not None:
                of_slot.receive_separate()
        lists = self.as_lists(unflattened)
        positions = {id(source): position for position, source in enumerate(self.sources)}
        for (slot, source), kept in taken.items():
            position = positions[source]
            grad = lists[slot][position]
            lists[slot][position] = kept.received() if grad is None else kept.received() + grad
        return [*map(SlotGradients, lists)]


class Kept(NamedTuple):
    """A gradient that waits on its slot. ``made`` is as in `SlotGradients`."""

    source: Tensor
    grad: Tensor
    made: ReadyEvent | None
    streams: dict[torch.device, torch.Stream]  # the computing streams of the forward

    def received(self) -> Tensor:
        """The gradient, ready for the current stream of its device."""
        if self.made is not None:
            self.made.receive([self.grad])
        return self.grad


class FormerGrad:
    """The ``.grad`` of a source that gradients wait for, and its version, at the last look.

    Attributes:
        sent: the former ``.grad``, where this one is a copy with gradients that have to go on (``reducer_buckets``).
    """

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.sent: Tensor | None = None
        self.look()

    def look(self) -> None:
        """From here on what waits belongs to the ``.grad`` that the source has now."""
        grad = self.source.grad
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else _torch.version_of(grad)

    def is_void(self) -> bool:
        """True if ``.grad`` is another one or has been set to zero since. Passes may have added to it."""
        grad = self.source.grad
        if grad is None or self._grad is None or self._grad() is not grad:
            return True
        return _torch.version_of(grad) != self._version and not bool(grad.any())


class GradientSums:
    """The gradients of one module that wait, and the switch of its sums.

    What waits belongs to no graph: the next pass with sums takes it, whatever copies it goes over.

    Attributes:
        are_on: if true, a pass sums gradients, else it leaves them on the slots.
    """

    first_that_waits = 1
    """Slot 0's gradients are in ``.grad`` and do not wait."""

    def __init__(self) -> None:
        self.are_on = True
        # By slot and the id of the source; by the id of the source. Values hold the source.
        self._kept: dict[tuple[int, int], Kept] = {}
        self._former: dict[int, FormerGrad] = {}
        # The sources that a pass has left gradients for, until it ends. Reentrant checkpoints nest passes.
        self._under_way: dict[PassOfBackward, set[int]] = {}

    @property
    def count(self) -> int:
        """How many gradients wait on the slots."""
        return len(self._kept)

    def keep(
        self, bucket: SourceBucket, by_slot: Sequence[SlotGradients | None], written: Set[int]
    ) -> list[Tensor | None]:
        """Leaves a bucket's gradients on all slots but the first, for the ``written`` sources; returns the first's.

        If only other slots have a gradient, the first one's is zeros: a source's ``.grad`` of ``None`` would say that
        what waits is void.
        """
        self.drop_void(bucket.sources)
        lists = bucket.as_lists(by_slot)
        first, *others = lists
        for position in written:
            if any(grads[position] is not None for grads in lists[self.first_that_waits :]):
                source = bucket.sources[position]
                if id(source) not in self._former:
                    self.begin_to_wait(source)
                if first[position] is None:
                    first[position] = torch.zeros_like(source)
        for slot, grads in enumerate(others, start=1):
            if (of_slot := by_slot[slot]) is not None:
                kept = [
                    Kept(bucket.sources[position], grad, of_slot.ready_event, bucket.streams)
                    for position in written
                    if (grad := grads[position]) is not None
                ]
                self._add(slot, kept, of_slot.ready_event)
        self._note_pass({id(bucket.sources[position]) for position in written})
        return [grad if position in written else None for position, grad in enumerate(first)]

    def begin_to_wait(self, source: Tensor) -> None:
        """Called before a pass writes the source's ``.grad``.

        If the pass fails, what waits belongs to this ``.grad``; if there is none, it is void.
        """
        self._former[id(source)] = FormerGrad(source)

    def take(self, bucket: SourceBucket, written: Set[int]) -> dict[tuple[int, int], Kept]:
        """Removes and returns what waits for the ``written`` sources: the running pass adds it to their gradients."""
        running = running_pass()
        if self.are_on and running.is_first((self, "add_kept")):
            # What waits for sources that this pass does not reach belongs to their ``.grad`` too.
            running.on_end(lambda ok: self.add_kept() if ok else None)
        self.drop_void(bucket.sources)
        return self._take({id(bucket.sources[position]) for position in written})

    def drop_void(self, sources: Sequence[Tensor] | None = None) -> None:
        """Frees what waits for ``sources``, or for all, and is void. What a pass writes just now tells nothing."""
        if not self._former:
            return
        written: set[int] = set().union(*[*self._under_way.values()])
        ids = {*self._former} if sources is None else {*map(id, sources)} & self._former.keys()
        self._take({each for each in ids - written if (former := self._former.get(each)) and former.is_void()})

    @torch.no_grad()
    def add_kept(self) -> None:
        """Adds what waits to the source's ``.grad``, unless it is void."""
        self.drop_void()
        terms: dict[int, list[Kept]] = defaultdict(list)
        for (_, of), kept in sorted(self._take({of for _, of in [*self._kept]}).items(), key=itemgetter(0)):
            terms[of].append(kept)
        # Kept gradients were made on the streams of the forward; ``.grad`` may have been written on others.
        for _, group in groupby(terms.values(), lambda of_source: id(of_source[0].streams)):
            of_forward = [*group]
            with streams_joined(of_forward[0][0].streams):
                for of_source in of_forward:
                    source = of_source[0].source
                    if source.grad is not None:  # else void: the engine still holds a pass that has failed
                        source.grad.add_(comm.reduce_add([kept.received() for kept in of_source], source.device))

    def _note_pass(self, sources: set[int]) -> None:
        running = running_pass()
        if running.is_first((self, "keep")):
            running.on_end(partial(self._end_pass, running))
        self._under_way[running] = self._under_way.get(running, set()) | sources

    def _end_pass(self, ended: PassOfBackward, ok: bool) -> None:
        """If the pass has succeeded, what waits belongs from here on to the ``.grad`` that it has written."""
        for each in self._under_way.pop(ended, ()):
            former = self._former.get(each)
            if ok and former is not None and former.source.grad is not None:
                former.look()

    def _add(self, slot: int, kept: Sequence[Kept], made: ReadyEvent | None) -> None:
        """Adds to the gradients that wait on a slot, on the stream that makes the slot's gradients.

        Each step is atomic: passes in several threads may add and take at the same time.
        """
        left = {id(each.source): each for each in kept}
        while left:
            former = {each: found for each in left if (found := self._kept.pop((slot, each), None)) is not None}
            if former:
                with streams_set({} if made is None else {made.stream.device: made.stream}):
                    sums = {each: found.received() + left[each].grad for each, found in former.items()}
                made = None if made is None else ReadyEvent(made.stream)
                left.update({each: left[each]._replace(grad=total, made=made) for each, total in sums.items()})
            for each, found in [*left.items()]:
                if self._kept.setdefault((slot, each), found) is found:
                    del left[each]

    def _take(self, sources: Set[int]) -> dict[tuple[int, int], Kept]:
        """Removes and returns what waits for ``sources``, by slot and source."""
        taken = {}
        for key in [*self._kept]:
            if key[1] in sources and (kept := self._kept.pop(key, None)) is not None:
                taken[key] = kept
        for source in sources:
            self._former.pop(source, None)
        return taken
