"""Kept replicas between passes hold no former nodes and no former memory."""

import pytest
import torch
from torch import Tensor, nn

from dataparallel.comm.streams.current import streams_joined
from dataparallel.composable import replicate
from freed_later import freed_later

on_accelerators = pytest.mark.devices("sim", "cuda")


def build(root: torch.device, width: int = 32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width).double().to(root)


def batch(module: nn.Linear) -> Tensor:
    return torch.linspace(-1, 1, 8 * module.in_features, dtype=torch.float64).view(8, -1).to(module.weight.device)


@pytest.fixture
def module(slots: list, root: torch.device) -> nn.Linear:
    """After the steps in which the order of gradients is learnt."""
    made = replicate(build(root), devices=slots)
    for _ in range(3):
        made(batch(made)).sum().backward()
    made.zero_grad()
    return made


@freed_later
@on_accelerators
@pytest.mark.usefixtures("warnings_are_errors")
@pytest.mark.parametrize("weight_decay", [0, 1])
def test_a_change_of_streams_leaves_no_former_nodes_behind(
    module: nn.Linear, root: torch.device, weight_decay: float
) -> None:
    """Nodes of the parameters would go on using the former stream, and torch warns of that."""

    def step() -> None:
        (module(batch(module)).sum() + weight_decay * module.weight.square().sum()).backward()

    step()
    with streams_joined({root: torch.Stream(root)}):
        step()
        step()
    step()


@pytest.mark.devices("sim")
def test_former_copies_are_gone_when_new_ones_are_made(slots: list, root: torch.device) -> None:
    if len({*slots}) < len(slots):
        pytest.skip("slots share devices")
    module = replicate(build(root, width=500), devices=slots)
    module(batch(module)).sum().backward()
    module.zero_grad()
    before = torch.sim.memory_allocated(slots[-1])
    torch.sim.reset_peak_memory_stats(slots[-1])
    module(batch(module)).sum()  # in buckets of another order
    assert before > 2_000_000
    assert torch.sim.max_memory_allocated(slots[-1]) < 1.2 * before
