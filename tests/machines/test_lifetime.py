"""Connections belong to their process, and hold up no end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataparallel.machines.group import issuer
from dataparallel.machines.lanes import Lane
from machine_ranks import all_machines, on_machines, said, summed, word
from processes import environment, run_ranks

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough

EXIT = """
import sys, time, torch
from datetime import timedelta
from torch import distributed
rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=100)
)
from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane, Machines
machines = Machines.of(distributed.group.WORLD)
lane = Lane(machines, "steps")
if what != "word":
    lane.end("backward", []).wait()
if rank == 0:
    if what == "failure":
        machines.state.fail(ValueError("no such column"))
    lane.launch("backward", ["bucket 0"], [stage(machines, torch.ones(3)).sum], "")
    time.sleep(0.5)
    print("rank 0 ends", flush=True)
else:
    sys.stdin.read()  # until the test has seen rank 0 end
"""


@pytest.mark.parametrize("what", ["word", "collective", "failure"])
def test_the_interpreter_ends_with_work_under_way(what: str, tmp_path: Path) -> None:
    """torch alone would wait for the other rank, or for the group's timeout."""
    variables = environment(GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo")
    second, first = (
        subprocess.Popen(
            [sys.executable, "-c", EXIT, rank, str(tmp_path), what],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "10"
    )
    try:
        assert first.stdin is not None
        assert first.communicate(timeout=40)[0] == "rank 0 ends\n"
        assert first.returncode == 0
    finally:
        first.kill()
        second.kill()
        first.wait()
        second.communicate()


ENDS = """
import atexit, os, sys, torch
from pathlib import Path
from torch import distributed, nn

def count():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("pt_gloo_runloop") for name in names)

atexit.register(lambda: print("at the end", count(), flush=True))  # called last
from dataparallel.composable import replicate
rank, folder = int(os.environ["TEST_RANK"]), os.environ["TEST_FOLDER"]
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = replicate(nn.Linear(3, 2), devices=["cpu", "cpu"], process_group=distributed.group.WORLD)
model(torch.ones(4, 3)).sum().backward()
print("in use", count() > 0, flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_no_thread_of_gloo_is_left_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """One that needs the interpreter's lock later would end the process by a signal."""
    for each in run_ranks(tmp_path, 2, ENDS, GLOO_SOCKET_IFNAME="lo"):
        assert each.stdout == "in use True\nat the end 0\n"
        assert each.returncode == 0


def forks(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    lane = Lane(machines, "steps")
    launched = summed(lane, torch.ones(1))
    with issuer.changed:  # as another thread may hold it at a fork
        child = os.fork()
    if child == 0:
        calls = [launched.wait, lambda: lane.end("backward", []), lambda: word(machines)]
        os._exit(sum("forked" in said(call) for call in calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert launched.wait().tolist() == [2]  # the parent goes on


def test_a_forked_child_is_told_that_it_is_no_rank() -> None:
    on_machines(forks)
