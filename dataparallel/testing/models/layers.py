"""Layers for tests of sharding: a norm, and perceptrons of two layers.

They have the names and sizes that torch's own tests of sharding use. 10 and 16 features divide evenly by 2, and
unevenly by most other numbers. The same seed gives the same weights everywhere: see `weights`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.testing.models.weights import draw_weights, fill, undrawn

__all__ = ["MLP", "RMSNorm", "StackedMLP"]


class RMSNorm(nn.Module):
    """Divides by the root of the mean square of the last dimension, then multiplies by a weight.

    It is made of plain operators, for tests in which each of them meets a sharded tensor. `torch.nn.RMSNorm` is one
    operator. Source of the formula: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Args:
        dim: the size of the last dimension. ``weight`` has this size and begins as ones.
        eps: is added to the mean square.
        device: of the weight; None is the default device.
        dtype: of the weight; None is the default dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Makes the weight ones again."""
        fill(self.weight, torch.ones(self.weight.shape, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``, whose last dimension is ``dim``."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


class MLP(nn.Module):
    """Two linear layers, 10 to 16 and 16 to 10 features, with a ReLU between them: ``net1``, ``relu``, ``net2``.

    Args:
        device: of the weights; None is the default device. On ``"meta"`` no weights are drawn.
        bias: the linear layers have biases.
        seed: the same seed gives the same weights, on each device and in each process.
    """

    def __init__(self, device: Any = None, bias: bool = True, *, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.net1 = undrawn(nn.Linear, 10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = undrawn(nn.Linear, 16, 10, bias=bias, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives the weights their first values again. Made on ``"meta"``, it gets them here, after ``to_empty``."""
        draw_weights(self, self.seed)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``, whose last dimension is 10."""
        hidden: Tensor = self.relu(self.net1(x))
        out: Tensor = self.net2(hidden)
        return out


class StackedMLP(nn.Module):
    """Several `MLP` one after the other: ``layers[i]``.

    Layer i is drawn from the seed ``seed + i``, so that a test sees if layers change places.

    Args:
        device: of the weights; None is the default device. On ``"meta"`` no weights are drawn.
        layers: how many.
        seed: the same seed gives the same weights, on each device and in each process.
    """

    def __init__(self, device: Any = None, layers: int = 2, *, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(device, seed=seed + i) for i in range(layers))

    def reset_parameters(self) -> None:
        """Gives the weights of all layers their first values again."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of ``x``, whose last dimension is 10."""
        for layer in self.layers:
            x = layer(x)
        return x
