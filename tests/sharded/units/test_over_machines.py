"""Units over machines: which gathers belong together, and gradients that wait for other machines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import fully_shard
from dataparallel.machines.arguments import MachineMesh
from dataparallel.machines.collectives import stage
from dataparallel.machines.errors import PeerFailed
from machine_ranks import on_machines
from sharded_machines import spread


def gathers(rank: int, devices: list[Any]) -> list[str]:
    """What the lane of gathers launches in a step whose units are used by both slots."""
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).to(devices[0])
    where = spread("1-D")
    for unit in (*net, net):
        fully_shard(unit, devices=devices, **where)
    machines = fully_shard.state(net).machines
    begun = []
    launch = machines.gathers.launch
    machines.gathers.launch = lambda *args, **options: begun.append(args[3].split("'")[1]) or launch(*args, **options)
    net(torch.randn(4, 4, device=devices[0])).sum().backward()
    return begun


def test_slots_of_a_machine_share_a_gather():
    """The last unit is gathered again in backward too, because only the root's units stay."""
    for begun in on_machines(gathers):
        assert begun == ["0", "1", "2", "2", "1", "0"]


def ends(rank: int, devices: list[Any], failing: int) -> Any:
    """Four machines, two groups; one machine fails in a pass in which each group has sums."""
    machines = MachineMesh(None, init_device_mesh("cpu", (2, 2)))
    row, column = machines.shard, machines.replicate
    assert (row.ranks, column.ranks) == ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])
    outcomes: list[Any] = []
    for fails in (False, True, False):
        staged = stage(row, torch.full((2,), float(rank)), 1)
        (part,) = machines.lane.launch("backward", ["x"], [staged.reduce_scatter], "x", row, column)
        if fails and rank == failing:
            machines.all.state.fail(RuntimeError("broken"))
        end = machines.lane.end("backward", [rank == 3])
        try:
            outcomes.append((end.wait()[0], part.wait().tolist()))
        except PeerFailed as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_in_one_group_reaches_those_of_the_other(failing):
    for first, failed, last in on_machines(ends, failing, ranks=4, slots=1, kind="cpu", group_timeout=20):
        assert first == ([True], [6.0])
        assert f"rank {failing} failed" in failed
        assert "broken" in failed
        assert last == failed
