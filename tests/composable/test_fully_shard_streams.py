"""A sharded model may be called on any streams, which may be others than those of its first call."""

import pytest
import torch
from torch import nn

from dataparallel.composable import fully_shard
from dataparallel.streams.current import streams_joined


@pytest.mark.devices("sim")
@pytest.mark.parametrize("steps_on_others", [1, 3])
@pytest.mark.parametrize("samples", [6, 1])
def test_steps_on_other_streams_than_the_first(slots, root, steps_on_others, samples):
    """The clocks raise if memory of one stream is used on another without an order, or goes back to the wrong one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(root)
    for layer in (model[0], model[2]):
        fully_shard(layer, devices=slots)
    fully_shard(model, devices=slots)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):  # the second one adds to gradients
            model(torch.randn(samples, 8, device=root)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
        with streams_joined({device: torch.Stream(device) for device in slots}):
            for _ in range(steps_on_others):
                step()
            torch.sim.check_clocks()
    torch.sim.check_clocks()


@pytest.mark.devices("sim")
@pytest.mark.parametrize("frees", [False, True])
def test_a_step_may_follow_unshard(slots, root, frees):
    """The clocks raise if the optimizer writes to shards that other slots still read."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(root)
    fully_shard(model[0], devices=slots)
    fully_shard(model, devices=slots)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(6, 64, device=root)).sum().backward()
    if frees:
        model[0].unshard(async_op=True)
        model[0].reshard()
    else:
        model[0].unshard()
    optimizer.step()
    torch.sim.check_clocks()


@pytest.mark.devices("sim")
def test_gradients_that_wait_on_the_slots_belong_to_the_streams_of_the_step(slots, root):
    """Operators on sharded tensors run on the streams that operators with a graph have used, here other ones."""
    model = fully_shard(nn.Linear(64, 64).to(root), devices=slots)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with streams_joined({device: torch.Stream(device) for device in slots}):
        model.weight * 2
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(6, 64, device=root)).square().mean().backward()
        model(torch.randn(6, 64, device=root)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.sim.check_clocks()
