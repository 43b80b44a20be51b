"""Shared by tests of `prefetch`: a module that shows its inputs, a loader, and the copies that wait for a call."""

import torch
from torch import Tensor, nn

from dataparallel.comm.streams import ahead


class Echo(nn.Module):
    """Returns what it got, doubled, and notes each replica's input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x * 2


def batches(count: int = 4, samples: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, samples, 6, dtype=torch.float64, generator=generator)
    return [(x[k].clone(), x[k].sum(1).gt(0).long()) for k in range(count)]


def waiting() -> int:
    """The number of copies that were sent ahead and that no call has taken.

    It reads a private of ``comm.streams.ahead``: no user needs to know, and on devices the copies are not to be seen.
    """
    return sum(map(len, ahead._not_taken.values()))


def left_behind() -> int:
    """`waiting`. Drops these copies too, so that one test's failure is not that of the next."""
    left = waiting()
    ahead._not_taken.clear()
    return left
