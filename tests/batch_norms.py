"""What tests of BatchNorm share: modules, batches, and a stand-in for the kernels of torch's SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.nn import sync_batch_norm

SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 1, 2)}


def made(kind: type, seed: int = 0, **options: Any) -> nn.Module:
    """A BatchNorm of 4 channels in float64. One weight is zero, as many models begin."""
    torch.manual_seed(seed)
    module = kind(4, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)[1] = 0
    return module


def batch_of(rows: int, kind: type = nn.BatchNorm2d, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + torch.randn(rows, 4, *SHAPES[kind], dtype=torch.float64, generator=generator)


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, check_device=False)


class Kernels:
    """The kernels, which exist on CUDA only. ``calls`` counts the calls of each.

    They compute what torch's sources say, and take what these take: one layout for all large tensors, vectors of the
    accumulating dtype. ``aten/src/ATen/native/cuda/Normalization.cuh`` is the source.
    """

    def __init__(self) -> None:
        self.calls = {"stats": 0, "elemt": 0, "reduce": 0, "backward_elemt": 0}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Kernels:
        monkeypatch.setattr(torch, "batch_norm_stats", self.stats)
        monkeypatch.setattr(torch, "batch_norm_elemt", self.elemt)
        monkeypatch.setattr(torch, "batch_norm_backward_reduce", self.reduce)
        monkeypatch.setattr(torch, "batch_norm_backward_elemt", self.backward_elemt)
        monkeypatch.setattr(sync_batch_norm, "_has_kernels", lambda chunk: chunk.numel() > 0)
        return self

    def stats(self, input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._check("stats", [input], [])
        variance, mean = torch.var_mean(input.to(_wide(input)), _dims(input), correction=0)
        inverse = (variance + eps).rsqrt()
        return mean, inverse if eps else inverse.masked_fill(variance == 0, 0)

    def elemt(self, input: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        self._check("elemt", [input], [weight, bias, mean, invstd])
        result = (input - _on(mean, input)) * _on(invstd, input)
        result = result if weight is None else result * _on(weight, input)
        result = result if bias is None else result + _on(bias, input)
        return result.to(input.dtype)

    def reduce(
        self,
        grad_out: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Any,
        input_g: bool,
        weight_g: bool,
        bias_g: bool,
    ) -> tuple[Any, ...]:
        self._check("reduce", [grad_out, input], [mean, invstd, weight])
        sums = grad_out.to(mean.dtype).sum(_dims(input)), (grad_out * (input - _on(mean, input))).sum(_dims(input))
        of_weight, of_bias = sums[1] * invstd if weight_g else None, sums[0] if bias_g else None
        return (*(sums if input_g else (None, None)), of_weight, of_bias)

    def backward_elemt(
        self,
        grad_out: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Any,
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
        count: Tensor,
    ) -> Tensor:
        self._check("backward_elemt", [grad_out, input], [mean, invstd, weight, sum_dy, sum_dy_xmu])
        assert count.dtype == torch.int32
        total = count.sum()
        slope = invstd**2 * sum_dy_xmu / total
        result = grad_out - _on(sum_dy / total, input) - (input - _on(mean, input)) * _on(slope, input)
        result = result * _on(invstd if weight is None else invstd * weight, input)
        return result.to(input.dtype)

    def _check(self, name: str, large: list[Tensor], vectors: list[Tensor | None]) -> None:
        self.calls[name] += 1
        first = large[0]
        assert first.numel() > 0
        layouts = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]
        assert any(all(each.is_contiguous(memory_format=layout) for each in large) for layout in layouts)
        assert all(each.dtype == first.dtype and each.device == first.device for each in large)
        for vector in vectors:
            assert vector is None or (vector.dtype == _wide(first) and vector.is_contiguous())


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _dims(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _on(vector: Tensor, tensor: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (tensor.dim() - 2))
