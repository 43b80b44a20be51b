"""Models whose replicas are captured as graphs, and what was captured of them. Only CUDA devices have graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.replicas.graphs.captures import WARM_UP, Segment

WIDTH = 6
SETTLE = WARM_UP + 3
"""So many training steps capture everything: replicas learn the order of gradients in the first one."""


class Block(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(self.down(self.up(self.norm(x)).relu()))


class Net(nn.Module):
    """Two parts, and operators before, between and after them. ``by_parts``: the whole cannot be captured."""

    def __init__(self, rate: float = 0.0, by_parts: bool = False) -> None:
        super().__init__()
        self.by_parts = by_parts
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(rate), Block(rate)])
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(self.norm(x))

    def begin(self, x: Tensor) -> Tensor:
        if self.by_parts:
            read_by_the_host(x)
        return self.first(x)


def read_by_the_host(x: Tensor) -> None:
    """What forbids a capture."""
    x.detach().sum().item()


def by_parts(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Builds modules of which only parts can be captured when gradients are recorded."""

    def build() -> nn.Module:
        module = kind()
        cls = type(module)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                read_by_the_host(next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
            return cls.forward(self, *args, **kwargs)

        module.__class__ = type(cls.__name__, (cls,), {"forward": forward})
        return module

    return build


def build(root: torch.device, kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().to(root)


def inputs(root: torch.device, samples: int = 12) -> Tensor:
    return torch.randn(samples, 4, dtype=torch.double).to(root)


def step(network: Any, x: Tensor) -> Tensor:
    loss = network(x).square().mean()
    loss.backward()
    return loss.detach()


def graphs_of(network: Any) -> Any:
    """The captured graphs of a module by one of the forms."""
    if isinstance(network, DataParallel):
        return network.options.graphs
    return (fully_shard if isinstance(network, FullyShardedModule) else replicate).state(network).graphs


def segments(network: Any) -> list[Segment]:
    return [] if graphs_of(network) is None else graphs_of(network).segments


def captured(network: Any) -> dict[str, int]:
    """By name of a module: the launches of its graphs, on all slots."""
    found: dict[str, int] = {}
    for segment in segments(network):
        if segment.captures:
            found[segment.name] = found.get(segment.name, 0) + segment.launches
    return found


def reasons(network: Any, of_parts: bool = False) -> set[str]:
    found = [segment for segment in segments(network) if segment.name or not of_parts]
    return {reason for segment in found for reason in segment.reasons}
