"""One bucket of gradients that go on after the slots: how they lie in a flat buffer, and what waits for a later pass.

``composable.exchanges`` runs passes over rows of these. Nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import SourceGradients
from dataparallel.comm.buckets import Bucket, Layout, flatten
from dataparallel.composable.gradient_sums import WaitingBucket

__all__ = ["ChainedBucket"]


class ChainedBucket:
    """One bucket of a chain.

    Attributes:
        waiting: the gradients that wait for a later pass.
        layout: how gradients lie in a flat buffer: each in the order of a contiguous tensor, whatever its strides are,
            so that it is the same on all machines.
        names: the names of the sources.
    """

    def __init__(self, waiting: WaitingBucket, names: Sequence[str]) -> None:
        self.waiting, self.names = waiting, list(names)
        for name, source in zip(names, waiting.sources, strict=True):
            if source.layout is not torch.strided or source.is_nested:
                raise TypeError(
                    f"parameter {name!r} is {'nested' if source.is_nested else source.layout}: its gradient cannot "
                    "travel in a flat buffer. Pass it in ignored_params, and sum its gradient yourself"
                )
        self.layout = Bucket.of([(i, _row_major(source)) for i, source in enumerate(waiting.sources)])

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the bucket."""
        return self.waiting.sources[0]

    def describe(self) -> str:
        """The bucket in words that are equal on all machines if the buckets are."""
        members = [f"{self.names[i]} {list(self.waiting.sources[i].shape)}" for i in self.layout.indices]
        return f"{self.like.dtype}: {', '.join(members)}"

    def packed(self, grads: Sequence[Tensor | None]) -> Tensor:
        """A new flat buffer with these gradients, on the current stream.

        Raises:
            TypeError: a gradient is sparse. The message names its parameter.
        """
        filled = []
        for name, source, grad in zip(self.names, self.waiting.sources, grads, strict=True):
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
        return torch.zeros(self.layout.numel, dtype=self.like.dtype, device=self.like.device)


def _row_major(tensor: Tensor) -> Layout:
    shape = tuple(tensor.shape)
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return Layout(shape, shape, tuple(reversed(strides)), tensor.numel(), True)
