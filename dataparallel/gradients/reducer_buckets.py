"""Buckets whose sums go on after the slots, to other machines or to a communication hook; their gradients may wait."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import ReadyEvent, SourceGradients
from dataparallel.comm.buckets import Bucket, FlatLayout, flatten
from dataparallel.gradients.gradient_sums import FormerGrad, GradientSums, Kept, SourceBucket


class Taken(NamedTuple):
    """What a pass has taken, by slot and the id of the source; and the ``.grad`` of each source before that."""

    kept: dict[tuple[int, int], Kept]
    shown: list[tuple[FormerGrad, Tensor]]


class ReducerSums(GradientSums):
    """The gradients of a module whose sums go on after the slots.

    - Slot 0's gradients are in ``.grad`` while they wait, but they have to go on with those of the other slots, and
      apart from sums that were sent before. So ``.grad`` becomes a copy of such sums when gradients begin to wait. The
      pass that takes them puts the sums back.
    - Only a pass with sums takes what waits, and only for the sources whose ``.grad`` it writes. If it fails, all is as
      it was before.
    """

    first_that_waits = 0
    """Slot 0's gradients are in ``.grad`` and wait there."""

    def begin_to_wait(self, source: Tensor) -> None:
        """As that of `GradientSums`. The running pass adds to a copy of what has gone on."""
        sent = source.grad
        if sent is not None:
            source.grad = sent.clone()
        super().begin_to_wait(source)
        self._former[id(source)].sent = sent

    def add_kept(self) -> None:
        """Nothing is added before it has gone on."""

    def take_to_send(self, bucket: SourceBucket, written: Set[int]) -> Taken:
        """Takes what waits for the ``written`` sources, slot 0's gradients too. The forward's streams are current."""
        self.drop_void(bucket.sources)
        sources = {id(bucket.sources[position]) for position in written}
        former = [found for each in sources if (found := self._former.get(each)) is not None]
        taken = Taken(self._take(sources), [])
        own: list[tuple[Tensor, Tensor]] = []
        for each in former:
            shown = each.source.grad
            if shown is not None:  # else the engine still holds a pass that has failed
                taken.shown.append((each, shown))
                own.append((each.source, shown if each.sent is None else shown - each.sent))
                each.source.grad = each.sent
        device = bucket.sources[0].device
        made = None if device.type == "cpu" else ReadyEvent(torch.accelerator.current_stream(device))
        taken.kept.update({(0, id(source)): Kept(source, grad, made, bucket.streams) for source, grad in own})
        return taken

    def put_back(self, taken: Taken) -> None:
        """The pass has failed: what it has taken waits again."""
        for former, shown in taken.shown:
            former.source.grad = shown
            self._former.setdefault(id(former.source), former)
        for (slot, _), kept in taken.kept.items():
            if slot:
                self._add(slot, [kept], kept.made)


class ReducerBucket(SourceBucket):
    """A bucket, and how its gradients lie in the flat buffer that goes on.

    Attributes:
        names: of the sources.
        layout: of the flat buffer. Each gradient has the order of a contiguous tensor, whatever its strides are, so
            that the buffer is the same on all machines.

    Raises:
        TypeError: a source cannot travel in a flat buffer.
    """

    def __init__(
        self,
        sums: GradientSums,
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


def _row_major(tensor: Tensor) -> FlatLayout:
    shape = tuple(tensor.shape)
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return FlatLayout(shape, shape, tuple(reversed(strides)), tensor.numel(), True)
