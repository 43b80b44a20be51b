"""A module that notes how it is called, for tests of what both forms do with a module and its methods."""

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """A class of this file's own, so that tests may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.width = 3
        self.sizes: list[int] = []  # of the batches
        self.ran: list[int] = []  # ids of the modules

    def forward(self, x: Tensor, *, scale: float = 1.0, offset: float | Tensor | None = None) -> Tensor:
        """Scales."""
        self.ran.append(id(self))
        self.calls += 1
        self.sizes.append(x.shape[0])  # `len` would warn where it is traced
        y = self.linear(x) * scale
        return y if offset is None else y + offset

    def generate(self, x: Tensor, offset: float) -> Tensor:
        """Adds."""
        self.sizes.append(x.shape[0])
        return self(x) + offset

    def encode(self, x: Tensor, offset: float = 0.0) -> Tensor:
        self.sizes.append(x.shape[0])
        return self.linear(x) + offset

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return x * 2


def build_affine(root: torch.device) -> Affine:
    torch.manual_seed(0)
    return Affine().double().to(root)
