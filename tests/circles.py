"""What tests of freed replicas share: modules with circles and without, and a watch on the replicas of a wrapper."""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dataparallel import DataParallel


class Straight(nn.Module):
    """No attribute leads to a module; the recurrent layer's lead to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rnn = nn.Linear(3, 3), nn.GRU(3, 3)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.rnn(self.layer(x))[0])

    def forward(self, x: Tensor) -> Any:
        # Recomputed in backward: the replica has to be there then.
        return checkpoint(self.block, x, use_reentrant=False)


class Circular(Straight):
    def __init__(self) -> None:
        super().__init__()
        self.layer.above = [self]
        self.enter = self.block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.enter, x, use_reentrant=False)


def least(count: Callable[[], int]) -> int:
    """The least of the counts in a moment: a thread of the engine may be late to drop its part of a graph."""
    counts = [count()]
    while counts[-1] and len(counts) < 10:
        time.sleep(0.01)
        counts.append(count())
    return min(counts)


class Watch(NamedTuple):
    """A wrapper, and weak references to all modules of all replicas it has made."""

    parallel: DataParallel
    replicas: list[weakref.ref]

    def alive(self) -> int:
        return least(lambda: sum(replica() is not None for replica in self.replicas))

    def intact(self) -> int:
        """Replicas that still have their attributes."""
        return sum(bool(vars(module)) for ref in self.replicas if (module := ref()) is not None)
