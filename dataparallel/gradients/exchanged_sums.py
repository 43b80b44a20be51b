"""Gradients that wait for a pass whose sums go on after the slots (``gradients.after_slots``).

In ``gradients.gradient_sums`` the gradients of slot 0 are in the source's ``.grad`` while those of other slots wait.
That cannot be where sums go on to other machines: there the next pass could not tell what it has to send from what
has been sent. So these rules differ:

- If sums are off, the gradients of all slots wait. The source's ``.grad`` stays as it is, or becomes zeros.
- Only a pass with sums takes them, and it takes those of the sources whose ``.grad`` it writes. If it fails, they wait
  again.
- They outlive the copies. When other copies take the place of those that they were made with, the new buckets get them.

``gradients.exchanges`` runs the passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import SlotGradients
from dataparallel.autograd.pass_of_backward import PassOfBackward
from dataparallel.gradients.gradient_sums import FormerGrad, GradientSums, Kept, WaitingBucket


class _Carried(NamedTuple):
    """What waits for a source that is in no bucket now."""

    source: Tensor
    former: FormerGrad
    kept: list[tuple[int, Kept]]  # with their slots


class ExchangedSums(GradientSums):
    """The buckets of a module whose sums go on after the slots."""

    def __init__(self) -> None:
        super().__init__()
        self._carried: dict[int, _Carried] = {}  # by the id of the source

    def use(self, buckets: Sequence[WaitingBucket]) -> None:
        """As that of `GradientSums`; the new buckets get what waits for their sources."""
        for former in self.buckets:
            self.carry(former)
        super().use(buckets)
        self._hand_over()

    def add_kept(self) -> None:
        """Nothing is added before it has been exchanged."""

    def carry(self, bucket: WaitingBucket) -> None:
        """Takes what waits in a bucket that is not used any more, for the bucket that now has its sources."""
        assert isinstance(bucket, ExchangedBucket)
        for source, former, kept in bucket.take_all():
            found = self._carried.setdefault(id(source), _Carried(source, former, []))
            found.kept.extend(kept)

    def carry_and_hand_over(self, bucket: WaitingBucket) -> None:
        """As `carry`, while other buckets are in use."""
        self.carry(bucket)
        self._hand_over()

    def _hand_over(self) -> None:
        if not self._carried:
            return
        for bucket in self.buckets:
            if isinstance(bucket, ExchangedBucket) and bucket.is_in_use:
                self.hand_over_to(bucket)

    def hand_over_to(self, bucket: ExchangedBucket) -> None:
        """The bucket gets what waits for its sources, unless that waits in another one."""
        for position, source in enumerate(bucket.sources):
            carried = self._carried.pop(id(source), None)
            if carried is not None:
                bucket.get(position, carried.former, carried.kept)

    def drop_void(self) -> None:
        """As that of `GradientSums`."""
        super().drop_void()
        for key, carried in [*self._carried.items()]:
            if carried.former.is_void(carried.source.grad):
                self._carried.pop(key, None)


class Taken(NamedTuple):
    """What a pass has taken from a bucket, by slot and source; and the ``.grad`` that it belongs to, by source."""

    bucket: ExchangedBucket
    kept: dict[tuple[int, int], Kept]
    former: dict[int, FormerGrad]

    def put_back(self) -> None:
        """The pass has failed: what it has taken waits again."""
        for source, former in self.former.items():
            kept = [(slot, each) for (slot, position), each in self.kept.items() if position == source]
            self.bucket.get(source, former, kept)
        if not self.bucket.is_in_use:
            self.bucket.exchanged.carry_and_hand_over(self.bucket)


class ExchangedBucket(WaitingBucket):
    """The gradients of one bucket that wait.

    Attributes:
        exchanged: the sums of the module.
    """

    def __init__(self, sums: ExchangedSums, sources: Sequence[Tensor], streams: object) -> None:
        super().__init__(sums, sources, streams)
        self.exchanged = sums

    @property
    def has_leaves_only(self) -> bool:
        """False if a source is the result of a computation, and its gradient goes on into that graph."""
        return self._has_leaves_only

    def keep(self, by_slot: Sequence[SlotGradients | None], written: set[int]) -> list[Tensor | None]:
        """Keeps the gradients of all slots for the ``written`` sources. Returns zeros for those without ``.grad``."""
        self.drop_void()
        returned: list[Tensor | None] = [None] * len(self.sources)
        for slot, grads in enumerate(self._as_lists(by_slot)):
            kept = {source: grad for source in written if (grad := grads[source]) is not None}
            for source in kept:
                before = self.sources[source].grad
                self._former.setdefault(source, FormerGrad(before))
                if before is None and returned[source] is None:
                    returned[source] = torch.zeros_like(self.sources[source])
            if (of_slot := by_slot[slot]) is not None:
                self._add(slot, kept, of_slot.made)
        self._note_pass(written)
        return returned

    def end_pass(self, ended: PassOfBackward, written: set[int], ok: bool) -> None:
        """As that of `WaitingBucket`. A bucket that is not used any more hands over what it has."""
        super().end_pass(ended, written, ok)
        if ok and not self.is_in_use:
            self.exchanged.carry_and_hand_over(self)

    def take(self, written: set[int]) -> Taken:
        """Takes what waits for the ``written`` sources, for a pass with sums."""
        if not self.is_in_use:
            self.exchanged.hand_over_to(self)
        self.drop_void()
        former = {source: self._former[source] for source in written if source in self._former}
        return Taken(self, self._take(written), former)

    def take_all(self) -> list[_Carried]:
        """Takes everything."""
        former, by_source = dict(self._former), defaultdict(list)
        for (slot, source), kept in self._take({*range(len(self.sources))}).items():
            by_source[source].append((slot, kept))
        return [_Carried(self.sources[source], former[source], kept) for source, kept in by_source.items()]

    def get(self, position: int, former: FormerGrad, kept: Sequence[tuple[int, Kept]]) -> None:
        """Gradients wait here for the source at a position, from another bucket or from a pass that has failed."""
        self._former.setdefault(position, former)
        for slot, each in kept:
            self._add(slot, {position: each.grad}, each.made)
