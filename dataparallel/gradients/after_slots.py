"""What happens to the sum of a bucket after the slots, in ``replicate`` over machines or with a communication hook.

Without an `AfterSlots` the sums over the slots are the gradients. With one, every pass that sums gradients is the same
row of calls on all machines: `AfterSlots.begin`, `Backward.launch` for each bucket in order, `Backward.end`, waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import SourceGradients
from dataparallel.comm.buckets import Bucket, FlatLayout, flatten
from dataparallel.gradients.exchanged_sums import ExchangedBucket


@dataclass(frozen=True, slots=True)
class BucketSum:
    """The sum over the slots of one bucket. A parameter that no slot has used has zeros in it.

    Attributes:
        index, count: the number of the bucket, from 0 on, and how many buckets every pass has.
        flat: one gradient after the other, each in the order of a contiguous tensor. It is not divided by anything, and
            belongs to whoever gets it.
        layout: where each gradient lies in ``flat``.
        parameters: their parameters, in the order of ``flat``.
        names: the names of the parameters.
    """

    index: int
    count: int
    flat: Tensor
    layout: Bucket
    parameters: Sequence[Tensor]
    names: Sequence[str]


class Arriving(Protocol):
    """Something that is under way."""

    def wait(self) -> Any:
        """Blocks the host until it is there, or has failed.

        Of a bucket: a flat tensor like the one that was launched, or that one, ordered on the current stream of its
        device. Of the end of a backward: for each parameter, in the order of all buckets, True if some machine has
        used it.
        """


class Backward(Protocol):
    """One pass."""

    def launch(self, sums: BucketSum) -> Arriving | None:
        """Takes a bucket further, and returns at once if it can. Called in the order of buckets, in any thread.

        ``None``: this has failed before in this pass, so nobody waits.
        """

    def end(self, used: Sequence[bool], error: BaseException | None = None) -> Arriving:
        """Called after the last bucket. ``used``: the parameters of all buckets that have a gradient here.

        ``error``: the pass has failed here. Buckets that were missing have been launched with zeros, and nobody waits.
        """


class AfterSlots(Protocol):
    """Takes the sums of one module further. It lives as long as the module, and other objects can take its place."""

    def begin(self, contents: str) -> Backward:
        """A pass begins. ``contents`` says which parameters are in which bucket, and is equal on all machines."""

    def signal_failure(self, error: BaseException) -> None:
        """A pass has failed here before it began, so the others would wait for it. A recorded forward has, too."""


class ChainedBucket:
    """One bucket of a chain.

    Attributes:
        waiting: the gradients that wait for a later pass.
        layout: how gradients lie in a flat buffer: each in the order of a contiguous tensor, whatever its strides are,
            so that it is the same on all machines.
        names: the names of the sources.
    """

    def __init__(self, waiting: ExchangedBucket, names: Sequence[str]) -> None:
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


def _row_major(tensor: Tensor) -> FlatLayout:
    shape = tuple(tensor.shape)
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return FlatLayout(shape, shape, tuple(reversed(strides)), tensor.numel(), True)
