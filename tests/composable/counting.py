"""A module that notes how it is called, for tests of what a replicated module does."""

import torch
from torch import nn


class Counts(nn.Module):
    """Notes the sizes of what it gets; an own class, so that tests may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.sizes: list[int] = []
        self.ran: list[int] = []  # ids of the modules

    def forward(self, x, *, scale=1.0):
        self.ran.append(id(self))
        self.calls += 1
        self.sizes.append(len(x))
        return self.linear(x) * scale
