"""Machines over torch's backend of NCCL, which the stand-in answers.

Tensors come and go by copies, which torch makes without kernels. So these tests need no operators.
"""

from pathlib import Path

import pytest

from processes import run_ranks
from stand_in import IN_OWN_PROCESSES

pytestmark = [*IN_OWN_PROCESSES, pytest.mark.usefixtures("compiled_libraries")]

SCRIPT = """
import os
from nogpu.cuda import libraries
libraries.open_libraries()
from datetime import timedelta
import torch
import torch.distributed as dist
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane, Machines

rank, world = int(os.environ["TEST_RANK"]), int(os.environ["TEST_WORLD"])
device = torch.device("cuda", rank)
dist.init_process_group(
    "nccl",
    init_method="file://" + os.environ["TEST_FOLDER"] + "/store",
    rank=rank,
    world_size=world,
    timeout=timedelta(seconds=20),
    device_id=device if EAGER else None,
)
some = dist.new_group([0, 1])
if rank < 2:
    machines = Machines.of(some)
    lane = Lane(machines, 'steps')
    for place in (device, torch.device("cuda", rank + 4), torch.device("cpu")):
        numbers = (torch.arange(4.0) + rank) * 1j
        staged = [stage(machines, numbers.to(place, copy=True), receives) for receives in (None, 2)]
        calls = [staged[0].sum, staged[1].reduce_scatter]
        results = [lane.launch("backward", ["a sum"], [call], "a sum")[0] for call in calls]
        whole, part = (result.wait().cpu() for result in results)
        assert whole.tolist() == [1j, 3j, 5j, 7j]
        assert part.tolist() == whole.tolist()[2 * rank : 2 * rank + 2]
        assert machines.all_gather(numbers.to(place)).cpu()[rank].tolist() == numbers.tolist()
"""


@pytest.mark.parametrize("eager", [False, True])
def test_some_ranks_send_complex_numbers_from_every_device_and_from_host_memory(tmp_path: Path, eager: bool) -> None:
    """With ``"nccl"`` alone, and also if `init_process_group` was given a ``device_id``: not all ranks come."""
    script = SCRIPT.replace("EAGER", str(eager))
    for each in run_ranks(tmp_path, 3, script, TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore"):
        assert each.returncode == 0, each.stdout
