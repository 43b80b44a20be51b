"""`SyncBatchNorm` across machines equals BatchNorm over the batches of all machines on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.nn import SyncBatchNorm
from machine_ranks import on_machines
from peer_machines import grad_of, spanning
from sharded_models import ResNet

ROWS = [5, 3, 4]


def batches(step: int, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(rows, 2, 8, 8, dtype=torch.float64, generator=generator) for rows in ROWS[:ranks]]


def train(rank: int, devices: list[torch.device], form: str, ranks: int, steps: int) -> int:
    torch.manual_seed(0)
    plain = ResNet(training=True).double()
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {}
    if form == "replicate":
        options = {"average": False, "sync_batch_norm": "across_machines"}
    else:
        SyncBatchNorm.convert(model, across_machines=True)
    model = spanning(model, devices, form, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.001, momentum=0.9) for each in (plain, model)]
    for step in range(steps):
        own = batches(step, ranks)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain(torch.cat(own))
        expected.square().sum().backward()
        found = model(own[rank].to(devices[0]))
        # fully_shard divides by the number of machines.
        (found.square().sum() * (1 if form == "replicate" else ranks)).backward()
        torch.testing.assert_close(found.cpu(), expected.split(ROWS[:ranks])[rank], rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(grad_of(ours), theirs.grad, rtol=1e-9, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)
    return steps


@pytest.mark.parametrize(
    ("form", "ranks", "slots", "steps"),
    [("replicate", 2, 2, 3), ("fully_shard", 2, 2, 3)]
    + [pytest.param("replicate", 3, slots, 20, marks=pytest.mark.long) for slots in (1, 2)],
)
def test_steps_of_a_resnet(form, ranks, slots, steps):
    assert on_machines(train, form, ranks, steps, ranks=ranks, slots=slots) == [steps] * ranks


def of_one_machine(rank: int, devices: list[torch.device]) -> bool:
    """With ``True`` the statistics are those of the machine's own replicas."""
    batch = batches(0, 2)[rank].to(devices[0])
    norm = nn.BatchNorm2d(2, affine=False).double()
    expected = copy.deepcopy(norm)(batch.cpu())
    found = replicate(
        nn.Sequential(nn.Conv2d(2, 2, 1, bias=False).double(), norm).to(devices[0]),
        devices=devices,
        process_group=torch.distributed.group.WORLD,
        sync_batch_norm=True,
        broadcast_buffers=False,
    )
    with torch.no_grad():
        found[0].weight.copy_(torch.eye(2).view(2, 2, 1, 1))
    torch.testing.assert_close(found(batch).cpu(), expected, rtol=1e-9, atol=1e-9)
    return True


def test_true_spans_the_replicas_of_one_machine():
    assert on_machines(of_one_machine) == [True, True]


class TestArgument:
    def test_needs_machines(self, slots):
        for wrap in (DataParallel, lambda module, slots, **options: replicate(module, devices=slots, **options)):
            module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).to(slots[0])
            with pytest.raises(ValueError, match="there is one machine only; pass a process_group or a mesh"):
                wrap(module, slots, sync_batch_norm="across_machines")
            assert type(module[1]) is nn.BatchNorm2d
