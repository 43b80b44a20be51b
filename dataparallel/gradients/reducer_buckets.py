"""Buckets whose sums go on after the slots, to other machines or to a communication hook; their gradients may wait.

They wait in another way than in ``gradients.gradient_sums``, where the source's ``.grad`` has slot 0's meanwhile: from
such a ``.grad`` the next pass could not tell what it has to send from what has been sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import SlotGradients, SourceGradients
from dataparallel.autograd.pass_of_backward import PassOfBackward
from dataparallel.comm.buckets import Bucket, Layout, flatten
from dataparallel.gradients.gradient_sums import FormerGrad, GradientSums, Kept, WaitingBucket


class _Carried(NamedTuple):
    """What waits for a source that is in no bucket now."""

    source: Tensor
    former: FormerGrad
    kept: list[tuple[int, Kept]]  # with their slots


class ReducerSums(GradientSums):
    """The buckets of a module whose sums go on after the slots.

    - If sums are off, the gradients of all slots wait. The source's ``.grad`` stays as it is, or becomes zeros.
    - Only a pass with sums takes them, and it takes those of the sources whose ``.grad`` it writes. If it fails, they
      wait again.
    - They outlive the copies. When other copies take the place of those that they were made with, the new buckets get
      them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._carried: dict[int, _Carried] = {}  # by the id of the source

    def use(self, buckets: Sequence[WaitingBucket]) -> None:
        """As that of `GradientSums`; the new buckets get what waits for their sources."""
        for former in self.buckets:
            self._carry(former)
        super().use(buckets)
        self._hand_over()

    def add_kept(self) -> None:
        """Nothing is added before it was sent."""

    def carry_and_hand_over(self, bucket: ReducerBucket) -> None:
        """Buckets in use get what waits in one that is not."""
        self._carry(bucket)
        self._hand_over()

    def _carry(self, bucket: WaitingBucket) -> None:
        assert isinstance(bucket, ReducerBucket)
        for source, former, kept in bucket.take_all_waiting():
            found = self._carried.setdefault(id(source), _Carried(source, former, []))
            found.kept.extend(kept)

    def _hand_over(self) -> None:
        if not self._carried:
            return
        for bucket in self.buckets:
            if isinstance(bucket, ReducerBucket) and bucket.is_in_use:
                self.hand_over_to(bucket)

    def hand_over_to(self, bucket: ReducerBucket) -> None:
        """The bucket gets what waits for its sources, unless that waits in another one."""
        for position, source in enumerate(bucket.sources):
            carried = self._carried.pop(id(source), None)
            if carried is not None:
                bucket.add_waiting(position, carried.former, carried.kept)

    def drop_void(self) -> None:
        """As that of `GradientSums`."""
        super().drop_void()
        for key, carried in [*self._carried.items()]:
            if carried.former.is_void(carried.source.grad):
                self._carried.pop(key, None)


class Taken(NamedTuple):
    """What a pass has taken from a bucket, by slot and source; and the ``.grad`` that it belongs to, by source."""

    bucket: ReducerBucket
    kept: dict[tuple[int, int], Kept]
    former: dict[int, FormerGrad]

    def put_back(self) -> None:
        """The pass has failed: what it has taken waits again."""
        for source, former in self.former.items():
            kept = [(slot, each) for (slot, position), each in self.kept.items() if position == source]
            self.bucket.add_waiting(source, former, kept)
        if not self.bucket.is_in_use:
            self.bucket.sums.carry_and_hand_over(self.bucket)


class ReducerBucket(WaitingBucket):
    """A bucket, its gradients that wait, and how gradients lie in the flat buffer that goes on.

    Attributes:
        names: of the sources.
        layout: of the flat buffer. Each gradient has the order of a contiguous tensor, whatever its strides are, so
            that the buffer is the same on all machines.

    Raises:
        TypeError: a source cannot travel in a flat buffer.
    """

    sums: ReducerSums

    def __init__(
        self,
        sums: ReducerSums,
        sources: Sequence[Tensor],
        streams: dict[torch.device, torch.Stream],
        names: Sequence[str],
    ) -> None:
        super().__init__(sums, sources, streams)
        self.names = list(names)
        for name, source in zip(names, sources, strict=True):
            if source.layout is not torch.strided or source.is_nested:
                raise TypeError(
                    f"parameter {name!r} is {'nested' if source.is_nested else source.layout}: its gradient cannot "
                    "travel in a flat buffer. Pass it in ignored_params, and sum its gradient yourself"
                )
        self.layout = Bucket.of([(i, _row_major(source)) for i, source in enumerate(sources)])

    # ---- the flat buffer ---------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """The bucket in words that are equal on all machines if the buckets are."""
        members = [f"{self.names[i]} {list(self.sources[i].shape)}" for i in self.layout.indices]
        return f"{self.sources[0].dtype}: {', '.join(members)}"

    def packed(self, grads: Sequence[Tensor | None]) -> Tensor:
        """A new flat buffer with these gradients, on the current stream.

        Raises:
            TypeError: a gradient is sparse. The message names its parameter.
        """
        filled = []
        for name, source, grad in zip(self.names, self.sources, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {name!r} has the layout {grad.layout}, and gradients go on to other machines, or "
                    "to a hook, in flat buffers. Make it dense, with sparse=False in an Embedding; or pass the "
                    "parameter in ignored_params, and sum its gradient yourself"
                )
            filled.append(torch.zeros_like(source) if grad is None else grad)
        return flatten(self.layout, filled)

    def fits(self, sums: SourceGradients) -> bool:
        """True if ``sums.flat`` is laid out in this way already."""
        return (
            sums.flat is not None
            and sums.bucket is not None
            and sums.bucket.row_major
            and sums.bucket.indices == self.layout.indices
        )

    def zeros(self) -> Tensor:
        """A flat buffer for a bucket without gradients, on the current stream."""
        return torch.zeros(self.layout.numel, dtype=self.sources[0].dtype, device=self.sources[0].device)

    # ---- gradients that wait -----------------------------------------------------------------------------------------

    def keep(self, by_slot: Sequence[SlotGradients | None], written: set[int]) -> list[Tensor | None]:
        """Keeps the gradients of all slots for the ``written`` sources. Returns zeros for those without ``.grad``."""
        returned: list[Tensor | None] = [None] * len(self.sources)
        for source in self._keep_of_slots(0, by_slot, written):
            if self.sources[source].grad is None:
                returned[source] = torch.zeros_like(self.sources[source])
        return returned

    def end_pass(self, ended: PassOfBackward, written: set[int], ok: bool) -> None:
        """As that of `WaitingBucket`. A bucket that is not used any more hands over what it has."""
        super().end_pass(ended, written, ok)
        if ok and not self.is_in_use:
            self.sums.carry_and_hand_over(self)

    def take_waiting(self, written: set[int]) -> Taken:
        """Takes what waits for the ``written`` sources, for a pass with sums."""
        if not self.is_in_use:
            self.sums.hand_over_to(self)
        self.drop_void()
        former = {source: self._former[source] for source in written if source in self._former}
        return Taken(self, self._take(written), former)

    def take_all_waiting(self) -> list[_Carried]:
        """Takes everything."""
        former, by_source = dict(self._former), defaultdict(list)
        for (slot, source), kept in self._take({*range(len(self.sources))}).items():
            by_source[source].append((slot, kept))
        return [_Carried(self.sources[source], former[source], kept) for source, kept in by_source.items()]

    def add_waiting(self, position: int, former: FormerGrad, kept: Sequence[tuple[int, Kept]]) -> None:
        """Gradients wait here for the source at a position, from another bucket or from a pass that has failed."""
        self._former.setdefault(position, former)
        for slot, each in kept:
            self._add(slot, {position: each.grad}, each.made)


def _row_major(tensor: Tensor) -> Layout:
    shape = tuple(tensor.shape)
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return Layout(shape, shape, tuple(reversed(strides)), tensor.numel(), True)
