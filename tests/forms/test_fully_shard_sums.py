"""Gradients have the same bits wherever the sums are made: at one slot after the other, or for each owner by itself."""

import pytest
import torch
from torch import nn

from dataparallel.comm import matrices
from dataparallel.composable import fully_shard


def _gradients(devices, batch_size=16, passes=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 13)) for _ in range(3)))
    for block in model:
        fully_shard(block, devices=devices)
    fully_shard(model, devices=devices)
    batch = torch.randn(batch_size, 13).to(devices[0])
    for _ in range(passes):  # the second is added to the first
        model(batch).square().sum().backward()
    return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3, 4, long=[8])
@pytest.mark.parametrize("batch_size", [16, 2])  # of 2 rows, not all slots get one
@pytest.mark.parametrize("whole", [0, 2**18], ids=["in pieces", "whole"])
def test_sums_have_the_same_bits_wherever_they_are_made(slots, monkeypatch, batch_size, whole):
    monkeypatch.setattr(matrices, "_IN_PIECES_FROM", whole)
    monkeypatch.setattr(matrices, "_LARGE", whole)  # on two streams
    found = _gradients(slots, batch_size)
    monkeypatch.setattr(matrices, "are_apart", lambda devices: False)
    assert all(map(torch.equal, found, _gradients(slots, batch_size)))
