"""torch.distributed over gloo takes tensors of simulated devices, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from processes import run_script

pytestmark = [
    pytest.mark.devices("sim"),
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
    ),
]

PREAMBLE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from dataparallel.testing.simulated import simulate

simulate(2)
rank = int(sys.argv[2])
device = torch.device("sim", rank)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)

def check(tensor, expected):
    assert tensor.device == device, tensor.device
    torch.testing.assert_close(tensor.cpu(), torch.tensor(expected))
"""

COLLECTIVES = """
x = torch.tensor([1.0, 2.0], device=device) * (rank + 1)
y = x.clone()
dist.all_reduce(y)
check(y, [3.0, 6.0])
y = x.clone()
dist.all_reduce(y, op=dist.ReduceOp.MAX)
check(y, [2.0, 4.0])
y = x.clone()
work = dist.all_reduce(y, async_op=True)
work.wait()
check(y, [3.0, 6.0])
y = x.clone()
dist.broadcast(y, src=1)
check(y, [2.0, 4.0])
y = x.clone()
dist.reduce(y, dst=0)
if rank == 0:
    check(y, [3.0, 6.0])
gathered = [torch.zeros(2, device=device) for _ in range(2)]
dist.all_gather(gathered, x)
check(torch.cat(gathered), [1.0, 2.0, 2.0, 4.0])
whole = torch.zeros(4, device=device)
dist.all_gather_into_tensor(whole, x)
check(whole, [1.0, 2.0, 2.0, 4.0])
part = torch.zeros(1, device=device)
dist.reduce_scatter_tensor(part, x)
check(part, [[3.0], [6.0]][rank])
part = torch.zeros(1, device=device)
dist.reduce_scatter(part, list(x.split(1)))
check(part, [[3.0], [6.0]][rank])
parts = [torch.zeros(2, device=device) for _ in range(2)] if rank == 0 else None
dist.gather(x, parts, dst=0)
if rank == 0:
    check(torch.cat(parts), [1.0, 2.0, 2.0, 4.0])
mine = torch.zeros(2, device=device)
dist.scatter(mine, [torch.ones(2, device=device), torch.ones(2, device=device) * 2] if rank == 0 else None, src=0)
check(mine, [rank + 1.0] * 2)
swapped = torch.zeros(2, device=device)
dist.all_to_all_single(swapped, x)
check(swapped, [[1.0, 2.0], [2.0, 4.0]][rank])
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(y, 0)
    check(y, [1.0, 2.0])
dist.barrier()
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert [found["rank"] for found in objects] == [0, 1]
"""

DATA_PARALLEL = """
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


def run_pair(script: str, folder: Path) -> None:
    """Runs the script as rank 0 and as rank 1. Fails if either fails."""
    arguments = [sys.executable, "-c", PREAMBLE + script, str(folder / "rendezvous")]
    second = subprocess.Popen([*arguments, "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        run_script(PREAMBLE + script, str(folder / "rendezvous"), "0")
    finally:
        try:
            output = second.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired:
            second.kill()
            output = second.communicate()[0]
    assert second.returncode == 0, output


@pytest.mark.long
def test_collectives_and_distributed_data_parallel(tmp_path: Path) -> None:
    run_pair(COLLECTIVES + DATA_PARALLEL, tmp_path)
