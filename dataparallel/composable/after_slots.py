"""What happens to the sum of a bucket after the slots: the protocol between `replicate` and who takes sums further.

Without an `AfterSlots` the sums over the slots are the gradients. With one, every pass that sums gradients is a row of
calls, the same on all machines ::

    backward = after.begin(contents)          # before the first bucket
    arriving = backward.launch(sums)          # each bucket once, in the order of its index, in the agreed order
    arriving = backward.end(used)             # after the last bucket
    arriving.wait()                           # only when all of the pass has been launched

Buckets that the pass has not reached come too, with zeros. ``composable.exchanges`` makes these calls.
``composable.machine_sums`` adds the sums of all machines, and communication hooks do what the user's function does.

Streams: `launch` is called with the streams current on which the sum was made (side streams, if there are any): what
reads the sum there, such as a copy to host memory, needs no event. `wait` of a launched bucket is called with the
computing streams of the forward current, and orders its result on them. This file imports nothing that sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dataparallel.comm.buckets import Bucket

__all__ = ["AfterSlots", "Arriving", "Backward", "BucketSum"]


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
