"""Gradients that wait on the slots (``no_sync``) until a pass sums them.

While sums are off, the gradients of all slots wait, and ``.grad`` stays as it is, or becomes zeros if there was none.
The sums of the next pass have them in it. The user may throw gradients away: what waits is void, and dropped, if
``.grad`` is ``None``, is another tensor, or has been set to zero. What waits outlives the copies that it is made with.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.autograd.bucket_gradients import SlotGradients
from dataparallel.autograd.gradient_streams import Made
from dataparallel.autograd.pass_of_backward import PassOfBackward, running_pass
from dataparallel.streams.current import streams_joined, streams_set

__all__ = ["GradientSums", "Taken", "WaitingBucket"]


class GradientSums:
    """The buckets of one module, and the switch of their sums.

    Attributes:
        are_on: if true, a pass sums gradients, else they wait.
        go_on: sums go on after the slots (``after_slots``), so nothing is added to ``.grad`` without having been there.
    """

    def __init__(self) -> None:
        self.are_on = True
        self.go_on = False
        # Weak references: a bucket belongs to its node, and refers to this object.
        self._buckets: list[weakref.ref[WaitingBucket]] = []
        self._between: dict[int, _Waiting] = {}  # for sources that are in no bucket now, by their ids

    @property
    def buckets(self) -> list[WaitingBucket]:
        """The buckets whose nodes still exist."""
        return [bucket for found in self._buckets if (bucket := found()) is not None]

    def use(self, buckets: Sequence[WaitingBucket]) -> None:
        """Replaces the buckets; the new ones get what waits. Graphs over the former ones may still have a backward."""
        for former in self.buckets:
            former.is_in_use = False
            self._take_from(former)
        for bucket in buckets:
            bucket.is_in_use = True
        self._buckets = [*map(weakref.ref, buckets)]
        self._hand_over()

    def hand_over_from(self, bucket: WaitingBucket) -> None:
        """The buckets in use get what waits in one that is used no more."""
        self._take_from(bucket)
        self._hand_over()

    def _take_from(self, bucket: WaitingBucket) -> None:
        for waiting in bucket.take_all():
            found = self._between.setdefault(id(waiting.source), waiting._replace(kept=[]))
            found.kept.extend(waiting.kept)

    def _hand_over(self) -> None:
        if self._between:
            for bucket in self.buckets:
                for position, source in enumerate(bucket.sources):
                    if (waiting := self._between.pop(id(source), None)) is not None:
                        bucket.put(position, waiting.former, waiting.kept)

    def add_when_the_pass_ends(self) -> None:
        """Calls `add_kept` at the end of the running pass, once for all buckets that ask for it."""
        running = running_pass()
        if running.is_first((self, "add_kept")):
            running.on_end(lambda ok: self.add_kept() if ok else None)

    def add_kept(self) -> None:
        """Adds what waits to the sources' ``.grad``, except what is void."""
        for bucket in self.buckets:
            bucket.add_kept()
        while self._between:
            _, waiting = self._between.popitem()
            if not waiting.former.is_void(waiting.source.grad):
                _add_to_grad(waiting.source, waiting.kept, waiting.streams)

    def drop_void(self) -> None:
        """Frees what is void."""
        for bucket in self.buckets:
            bucket.drop_void()
        for key, waiting in [*self._between.items()]:
            if waiting.former.is_void(waiting.source.grad):
                self._between.pop(key, None)


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


class _Waiting(NamedTuple):
    """What waits for one source."""

    source: Tensor
    former: FormerGrad
    kept: list[tuple[int, Kept]]  # with their slots
    streams: Any


class Taken(NamedTuple):
    """What a pass has taken from a bucket, by slot and source; and the ``.grad`` that it belongs to, by source."""

    bucket: WaitingBucket
    kept: dict[tuple[int, int], Kept]
    former: dict[int, FormerGrad]

    def put_back(self) -> None:
        """The pass has failed before it has written a ``.grad``: what it has taken waits again."""
        for source, former in self.former.items():
            kept = [(slot, each) for (slot, position), each in self.kept.items() if position == source]
            self.bucket.put(source, former, kept)
        if not self.bucket.is_in_use:
            self.bucket.sums.hand_over_from(self.bucket)


class WaitingBucket:
    """What waits for the sources of one bucket.

    Attributes:
        is_in_use: true if the next forward uses this bucket. Others hand over what waits in them.
        has_leaves_only: false if a source is the result of a computation. Its gradient goes on into that graph.
    """

    def __init__(self, sums: GradientSums, sources: Sequence[Tensor], streams: Any) -> None:
        self.sums = sums
        self.sources = list(sources)
        self.is_in_use = False
        self.has_leaves_only = all(source.is_leaf for source in sources)
        self._streams = streams
        self._kept: dict[tuple[int, int], Kept] = {}  # by slot and source
        self._former: dict[int, FormerGrad] = {}  # by source
        # Those that keep gradients here and have not ended: several, if reentrant checkpoints nest one on each slot.
        self._under_way: set[PassOfBackward] = set()

    def reached(self, from_source: Any) -> tuple[bool, set[int]]:
        """True if the running pass goes on behind the bucket's node; positions of sources whose ``.grad`` it writes.

        ``backward(inputs=...)`` may write only some. A source that is the result of a computation has none: its
        gradient goes on into that graph. ``from_source`` is the bucket's `FromSource` node.
        """
        reached, written = False, set()
        for position, (following, _) in enumerate(from_source.next_functions):
            try:
                if not _torch.will_engine_execute_node(following):
                    continue
                if self.sources[position].is_leaf:
                    written.add(position)
            except RuntimeError:  # torch raises it for a leaf whose gradient `torch.autograd.grad` is to return
                pass
            reached = True
        return reached, written

    def keep(self, by_slot: Sequence[SlotGradients | None], written: set[int]) -> list[Tensor | None]:
        """Keeps the gradients of all slots for the ``written`` sources. Returns zeros for those without ``.grad``."""
        self.drop_void()
        returned: list[Tensor | None] = [None] * len(self.sources)
        for slot, grads in enumerate(self._as_lists(by_slot)):
            kept = {source: grad for source in written if (grad := grads[source]) is not None}
            for source in kept:
                before = self.sources[source].grad
                # The ``.grad`` from before this pass, until it ends. If the pass fails, kept gradients belong to that
                # one; if there was none, they are void.
                self._former.setdefault(source, FormerGrad(before))
                if before is None and returned[source] is None:
                    returned[source] = torch.zeros_like(self.sources[source])
            if (of_slot := by_slot[slot]) is not None:
                self._add(slot, kept, of_slot.made)
        self._note_pass(written)
        return returned

    def take(self, written: set[int]) -> Taken:
        """Takes what waits for the ``written`` sources, for a pass with sums."""
        if not self.sums.go_on:
            if self.sums.are_on:
                # What waits for sources that this pass does not reach belongs to its sums too.
                self.sums.add_when_the_pass_ends()
            if not self.is_in_use and (self.sums.are_on or torch.is_grad_enabled()):
                # After this pass the buckets in use cannot tell from ``.grad`` what is void: it may be another tensor.
                self.sums.add_kept()
        self.drop_void()
        former = {source: self._former[source] for source in written if source in self._former}
        return Taken(self, self._take(written), former)

    def take_all(self) -> list[_Waiting]:
        """Takes everything."""
        former, by_source = dict(self._former), defaultdict(list)
        for (slot, source), kept in self._take({*range(len(self.sources))}).items():
            by_source[source].append((slot, kept))
        return [_Waiting(self.sources[i], former[i], kept, self._streams) for i, kept in by_source.items()]

    def put(self, position: int, former: FormerGrad, kept: Iterable[tuple[int, Kept]]) -> None:
        """Gradients wait here for the source at a position, from another bucket or from a pass that has failed."""
        self._former.setdefault(position, former)
        for slot, each in kept:
            self._add(slot, {position: each.grad}, each.made)

    def added(
        self, by_slot: Sequence[SlotGradients | None], taken: dict[tuple[int, int], Kept]
    ) -> list[SlotGradients | None]:
        """The gradients of this pass plus those that `take` has taken, on the current streams."""
        unflattened = [None if of_slot is None else of_slot.unflattened() for of_slot in by_slot]
        for of_slot in unflattened:
            if of_slot is not None:
                of_slot.receive_others()
        lists = self._as_lists(unflattened)
        for (slot, source), kept in taken.items():
            grad = lists[slot][source]
            lists[slot][source] = kept.received() if grad is None else kept.received() + grad
        return [*map(SlotGradients, lists)]

    def _as_lists(self, by_slot: Sequence[SlotGradients | None]) -> list[list[Tensor | None]]:
        return [[None] * len(self.sources) if of_slot is None else of_slot.as_list() for of_slot in by_slot]

    def drop_void(self) -> None:
        """See `GradientSums`. Does nothing while a pass changes ``.grad``, which tells nothing then."""
        if not self._under_way:
            former = [*self._former.items()]
            self._take({source for source, grad in former if grad.is_void(self.sources[source].grad)})

    def add_kept(self) -> None:
        """See `GradientSums`."""
        if not self._kept:
            return
        self.drop_void()
        by_source: dict[int, list[tuple[int, Kept]]] = defaultdict(list)
        for (slot, source), kept in self._take({source for _, source in [*self._kept]}).items():
            by_source[source].append((slot, kept))
        for source, kept_on_slots in by_source.items():
            _add_to_grad(self.sources[source], kept_on_slots, self._streams)

    def _note_pass(self, written: set[int]) -> None:
        running = running_pass()
        self._under_way.add(running)
        running.on_end(partial(self.end_pass, running, written))

    def end_pass(self, ended: PassOfBackward, written: set[int], ok: bool) -> None:
        """If the pass has succeeded, kept gradients belong from here on to the ``.grad`` that it has written."""
        self._under_way.discard(ended)
        if not ok:
            return
        for source in written & self._former.keys():
            grad = self.sources[source].grad
            if grad is not None:
                self._former[source] = FormerGrad(grad)
        if not self.is_in_use:
            self.sums.hand_over_from(self)

    def _add(self, slot: int, grads: dict[int, Tensor], made: Made | None) -> None:
        """Adds to a slot's kept gradients, by source, on the stream that makes the slot's gradients.

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


@torch.no_grad()
def _add_to_grad(parameter: Tensor, kept: Iterable[tuple[int, Kept]], streams: Any) -> None:
    if parameter.grad is None:  # void: the engine still holds a pass that has failed
        return
    # Kept gradients were made on the streams of the forward; ``.grad`` may have been written on others.
    with streams_joined(streams):
        grads = [each.received() for _, each in sorted(kept, key=itemgetter(0))]
        parameter.grad.add_(comm.reduce_add(grads, parameter.device))
