"""The gradients of small units are added on one slot for all owners. Their bits are those of sums at each owner."""

import pytest
import torch
from torch import nn

from dataparallel.composable import fully_shard
from dataparallel.units import sums


def _gradients(devices, batch_size=16, passes=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13)) for _ in range(3)))
    for block in model:
        fully_shard(block, devices=devices)
    fully_shard(model, devices=devices)
    batch = torch.randn(batch_size, 13).to(devices[0])
    for _ in range(passes):  # the second is added to the first
        model(batch).square().sum().backward()
    are_small = [block_state.unit.gradients._sums._is_small for block_state in map(fully_shard.state, model)]
    return are_small, [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]


@pytest.mark.devices("sim")
@pytest.mark.slots(3, 4, long=[8])
@pytest.mark.parametrize("batch_size", [16, 2])  # of 2 rows, not all slots get one
def test_sums_have_the_same_bits_wherever_they_are_made(slots, monkeypatch, batch_size):
    are_small, found = _gradients(slots, batch_size)
    assert all(are_small)
    monkeypatch.setattr(sums, "_ADDED_ON_ONE", 0)
    are_small, expected = _gradients(slots, batch_size)
    assert not any(are_small)
    assert all(map(torch.equal, found, expected))


@pytest.mark.devices("sim")
@pytest.mark.slots(4)
def test_larger_rows_are_received_one_by_one_with_the_same_bits(slots, monkeypatch):
    monkeypatch.setattr(sums, "_ADDED_ON_ONE", 0)
    _, together = _gradients(slots)
    monkeypatch.setattr(sums, "_RECEIVED_TOGETHER", 1)
    _, singly = _gradients(slots)
    assert all(map(torch.equal, together, singly))
