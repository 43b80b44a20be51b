"""The ways to run one module on several devices that the benchmarks compare. Each takes and returns a module.

Measures nothing. `ByHand` is the way without any library, which the others are measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate

Way = Callable[[nn.Module, Sequence[torch.device]], nn.Module]


class ByHand(nn.Module):
    """Calls ``module`` with one chunk of the batch after the other, on one device and without the library.

    This is what splitting a batch costs by itself: small chunks cost more per sample than one large batch.
    """

    def __init__(self, module: nn.Module, chunks: int) -> None:
        super().__init__()
        self.module = module
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(chunk) for chunk in x.chunk(self.chunks)])


def by_hand(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """As many chunks as there are devices, all of them on the module's own device."""
    return ByHand(module, len(devices))


def data_parallel(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    return DataParallel(module, device_ids=devices)


def replicated(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """The module itself, changed for good."""
    return replicate(module, devices=devices)


def torch_data_parallel(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Distinct accelerators only. Those that are not CUDA's need `torch_pipeline.StandIns` while it runs."""
    return nn.DataParallel(module, device_ids=[device.index for device in devices])
