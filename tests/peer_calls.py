"""What tests of collectives share: a module that calls a function in each replica, and one-device counterparts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel


class Calls(nn.Module):
    """``forward(chunk)`` is ``function(chunk, weight)``, with a parameter that all replicas have."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any], size: int = 3) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.float64))

    def forward(self, chunk: Tensor) -> Any:
        return self.function(chunk, self.weight)


def parallel(function: Callable[[Tensor, Tensor], Any], slots: list[Any], **kwargs: Any) -> DataParallel[Calls]:
    """A wrapped `Calls` on ``slots``."""
    return DataParallel(Calls(function).to(slots[0]), slots, **kwargs)


def on_a_side_stream(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """What each replica does, on a stream of its own, also where several are on one device."""

    def run(x: Tensor, _: Any) -> Tensor:
        side, outer = torch.Stream(x.device), torch.accelerator.current_stream(x.device)
        side.wait_stream(outer)
        x.record_stream(side)
        try:
            with side:
                result = function(x)
        finally:
            outer.wait_stream(side)
        result.record_stream(outer)
        return result

    return run


def samples(rows: int, size: int = 3, seed: int = 0) -> Tensor:
    """Random samples in float64."""
    return torch.randn(rows, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
