"""`Fragile` is a layer that fails where a marked sample comes by, for tests of steps in which something fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MARK = -1000.0
"""In the last column of a sample. Layers hand it on, and one fails on the slot that has it."""


class Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in a function's backward")


def raises(gradient: Tensor) -> None:
    raise ArithmeticError("in a backward hook")


class Fragile(nn.Module):
    """A residual layer that fails as it is told, on the slot that has a marked sample.

    ``fails`` is the same list on every slot.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.fails = [""]

    def forward(self, x: Tensor) -> Any:
        y = x + torch.tanh(self.linear(x))
        fails = self.fails[0] if self.fails[0] and (x[:, -1] < MARK / 2).any() else ""
        if fails == "forward":
            raise ArithmeticError("in forward")
        if fails == "hook" and y.requires_grad:  # not where a reentrant checkpoint runs it first
            y.register_hook(raises)
        return Raises.apply(y) if fails == "backward" else y
