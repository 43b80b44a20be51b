"""torch.distributed over gloo takes tensors of simulated devices, in two processes: all its operators are the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from processes import run_ranks

pytestmark = [
    pytest.mark.devices("sim"),
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
    ),
]

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from nogpu.simulated import simulate

simulate(2)
rank = int(os.environ["TEST_RANK"])
device = torch.device("sim", rank)
dist.init_process_group("gloo", init_method="file://" + os.environ["TEST_FOLDER"] + "/store", rank=rank, world_size=2)
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
x = torch.randn(4, 3, dtype=torch.float64)
whole(x).square().mean().backward()
expected = [parameter.grad.clone() for parameter in whole.parameters()]
whole.zero_grad()
replica = nn.parallel.DistributedDataParallel(whole.to(device), device_ids=None)
for _ in range(2):
    replica.zero_grad()
    replica(x.chunk(2)[rank].to(device)).square().mean().backward()
for parameter, gradient in zip(replica.parameters(), expected):
    torch.testing.assert_close(parameter.grad.cpu(), gradient)
    assert parameter.grad.device == device
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_distributed_data_parallel(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, 2, SCRIPT)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stdout for each in done)
