"""torch on the stand-in for NCCL: ``torch.cuda.nccl`` in one process, and process groups of 2 and 3 processes.

Tensors come and go by copies, which torch makes without kernels. So these tests need no operators.
"""

import pytest

from processes import run_ranks
from stand_in import IN_OWN_PROCESSES

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

START = """
import os
from nogpu.cuda import libraries
libraries.open_libraries()
import torch
import torch.distributed as dist
from torch.cuda import nccl
"""
IN_GROUP = (
    START
    + """
rank, world = int(os.environ["TEST_RANK"]), int(os.environ["TEST_WORLD"])
store = "file://" + os.environ["TEST_FOLDER"] + "/store"
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world)
base = torch.arange(6.0)
mine = lambda: (base + rank).to(device)
zeros = lambda count=6: torch.zeros(count).to(device)
def same(tensor, expected):
    assert torch.equal(tensor.cpu(), expected), (tensor.cpu(), expected)
"""
)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("eager", [False, True])
def test_process_group(tmp_path, count, eager):
    start = IN_GROUP.replace("world_size=world", "world_size=world, device_id=device") if eager else IN_GROUP
    script = """
total = sum(base + r for r in range(world))
x = mine(); dist.all_reduce(x); same(x, total)
x = mine(); dist.all_reduce(x, op=dist.ReduceOp.AVG); same(x, total / world)
x = mine(); dist.all_reduce(x, op=dist.ReduceOp.MAX); same(x, base + world - 1)
x = torch.tensor([rank == 1]).to(device); dist.all_reduce(x); same(x, torch.tensor([True]))
x = mine(); dist.broadcast(x, 1); same(x, base + 1)
x = mine(); dist.reduce(x, 0); same(x, total) if rank == 0 else None
x = zeros(6 * world); dist.all_gather_into_tensor(x, mine()); same(x, torch.cat([base + r for r in range(world)]))
wide = lambda r: torch.arange(4.0 * world) + r
x = zeros(4); dist.reduce_scatter_tensor(x, wide(rank).to(device))
same(x, sum(wide(r) for r in range(world))[4 * rank : 4 * rank + 4])
x = zeros(4 * world); dist.all_to_all_single(x, wide(rank).to(device))
same(x, torch.cat([wide(r)[4 * rank : 4 * rank + 4] for r in range(world)]))
x = mine()
if rank == 0:
    dist.send(x, 1)
elif rank == 1:
    dist.recv(x, 0)
    same(x, base)
x, y = mine(), zeros()
around = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, y, (rank - 1) % world)]
for work in dist.batch_isend_irecv(around):
    work.wait()
same(y, base + (rank - 1) % world)
x = mine(); work = dist.all_reduce(x, async_op=True); work.wait(); same(x, total)
torch.cuda.synchronize()
assert work.is_completed()
pair = dist.new_group([0, 1])
if rank < 2:
    x = torch.ones(2).to(device); dist.all_reduce(x, group=pair); same(x, torch.full((2,), 2.0))
dist.destroy_process_group()
"""
    for each in run_ranks(tmp_path, count, start + script, TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore"):
        assert each.returncode == 0, each.stdout
