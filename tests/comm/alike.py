"""Tensors of many kinds, and how results of transports compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensor_kinds import strides
from torch import Tensor


def made(device: torch.device | str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 3, generator=generator) for _ in range(4)]
    tensors += [torch.randn(5, 4, generator=generator).t()]
    tensors += [torch.arange(7), torch.eye(3).to_sparse(), torch.randn(9, generator=generator).to(torch.bfloat16)]
    tensors += [torch.randn(4, 3, generator=generator), torch.empty(0, 3), torch.tensor(3.0)]
    tensors += [torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)]
    with_holes_and_repeats = [
        torch.arange(10.0).to(device)[::2],
        torch.randn(1, generator=generator).to(device).expand(6),
    ]
    return [tensor.to(device) for tensor in tensors] + with_holes_and_repeats


def assert_alike(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        assert (mine.device, mine.dtype, mine.shape) == (theirs.device, theirs.dtype, theirs.shape)
        assert mine.layout == theirs.layout
        if mine.layout is torch.strided:
            assert strides(mine) == strides(theirs)
        assert torch.equal(mine.to_dense().cpu(), theirs.to_dense().cpu())
