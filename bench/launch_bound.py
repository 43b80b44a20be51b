"""Models whose time is that of launching operators: narrow linear layers in a row, each with an activation.

They show what the host costs. `free_threads` times them on CPU slots, and `free_timelines` records them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16
SAMPLES_PER_SLOT = 8
LAYERS = (30, 120, 300)
OPERATORS_PER_LAYER = 2


def layers_in_a_row(layers: int) -> nn.Module:
    """The same model at each call. Neither values nor gradients vanish: weights are orthogonal."""
    generator = torch.Generator().manual_seed(0)
    modules: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(linear.weight, generator=generator)
        nn.init.normal_(linear.bias, std=0.01, generator=generator)
        modules += [linear, nn.Tanh()]
    return nn.Sequential(*modules)


def batch(slots: int) -> Tensor:
    """Samples for so many slots."""
    return torch.randn(slots * SAMPLES_PER_SLOT, WIDTH, generator=torch.Generator().manual_seed(1))
