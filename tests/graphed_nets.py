"""Models whose replicas are captured as graphs, and what was captured of them. Only CUDA devices have graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from dataparallel.forms.fully_sharded_module import FullyShardedModule
from dataparallel.replicas.graphs.calls import WARM_UP, GraphedReplica
from each_form import whole

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
    """Two parts, and operators before, between and after them."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(rate), Block(rate)])
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(self.norm(x))

    def begin(self, x: Tensor) -> Tensor:
        return self.first(x)


def build(root: torch.device, kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().to(root)


def inputs(root: torch.device, samples: int = 12) -> Tensor:
    return torch.randn(samples, 4, dtype=torch.double).to(root)


def step(network: Any, x: Tensor) -> Tensor:
    loss = network(x).square().mean()
    loss.backward()
    return loss.detach()


def warm_up(network: Any, x: Tensor, slots: Sequence[torch.device]) -> None:
    """Calls the network without a graph until the next call launches what was captured on every slot.

    A replica is captured in a thread that it has run in. Slots on one device share its threads, so that takes longer.
    """
    for _ in range(WARM_UP):
        network(x)
    for _ in range(0 if len({*slots}) == len(slots) else 50):
        before = captured(network)
        network(x)
        if captured(network) - before >= len(graphed(network)):
            break


def graphs_of(network: Any) -> Any:
    """The captured graphs of a module by one of the forms."""
    if isinstance(network, DataParallel):
        return network.options.graphs
    form = fully_shard if isinstance(network, FullyShardedModule) else replicate
    return form.state(network).graphs  # type: ignore[attr-defined]


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients, whole where they are sharded."""
    return [None if p.grad is None else whole(p.grad).clone() for p in module.parameters()]


def graphed(network: Any) -> list[GraphedReplica]:
    return [] if graphs_of(network) is None else graphs_of(network).replicas


def captured(network: Any) -> int:
    """The launches of captures, on all slots."""
    return sum(replica.launches for replica in graphed(network))


@contextmanager
def replays() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """The CUDA graphs that are launched inside, by any thread."""
    launched, replay = list[torch.cuda.CUDAGraph](), torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        launched.append(graph)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", noted):
        yield launched


def reasons(network: Any) -> set[str]:
    return {reason for replica in graphed(network) for reason in replica.reasons}
