"""What the library is measured against: the same chunks, one after the other on one device, without the library."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByHand(nn.Module):
    """What splitting a batch into chunks costs by itself: small chunks cost more per sample."""

    def __init__(self, module: nn.Module, chunks: int) -> None:
        super().__init__()
        self.module = module
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(chunk) for chunk in x.chunk(self.chunks)])
