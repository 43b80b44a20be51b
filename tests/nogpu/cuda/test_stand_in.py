"""torch's CUDA build itself on a stand-in: in this process's children, and in theirs."""

import subprocess
import sys

import pytest

from processes import environment
from stand_in import IN_OWN_PROCESSES, WHY_NOT

pytestmark = IN_OWN_PROCESSES

SUM = """
import torch
assert torch.cuda.is_available()
print(torch.arange(4.0, device="cuda:1").sum().item(), torch.cuda.device_count())
"""


def printed(*arguments: str, **changes: str) -> str:
    """What Python prints with these arguments, in a process that has no stand-in before."""
    variables = environment(**changes)
    variables.pop("NOGPU_STAND_IN", None)
    done = subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What takes minutes is done before the first test, which the watchdog counts."""
    if WHY_NOT is None:
        printed("-c", "from nogpu import cuda; cuda.stand_in(1)")


def test_a_program_that_starts_it():
    script = f"from nogpu import cuda\nprint(cuda.stand_in(2)[1])\n{SUM}"
    assert printed("-c", script).split() == ["cuda:1", "6.0", "2"]


def test_a_forked_process_computes_whatever_other_threads_did_at_the_fork():
    """A worker of a `DataLoader` collates tensors, while another thread of its parent takes memory."""
    script = """
from nogpu import cuda
cuda.stand_in(1)
import os, signal, threading, torch
runtime, tensors, stop = torch.cuda.cudart(), [torch.ones(3), torch.ones(2)], threading.Event()
def take(memory):
    while not stop.is_set():
        runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        runtime.cudaHostUnregister(memory.data_ptr())
torch.ones(1, device="cuda")
threads = [threading.Thread(target=take, args=(torch.zeros(1024),)) for _ in range(3)]
for thread in threads:
    thread.start()
failed = 0
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(2)
        os._exit(len(torch.cat(tensors)) != 5)
    failed += os.waitpid(child, 0)[1] != 0
stop.set()
print(failed)
"""
    assert printed("-c", script).split() == ["0"]


def test_devices_are_what_they_are_like():
    script = """
from nogpu import cuda
cuda.stand_in(2, like="rtx_3090")
import torch
found = torch.cuda.get_device_properties(1)
print(found.name, found.major, found.minor, found.total_memory == 24 * 2**30, found.multi_processor_count, sep=",")
print(torch.cuda.can_device_access_peer(0, 1))
"""
    properties, peers = printed("-c", script).splitlines()
    assert properties == "NVIDIA GeForce RTX 3090 (stand-in, no GPU),8,6,True,82"
    assert peers == "False"


def test_a_script_by_the_command(tmp_path):
    (tmp_path / "sum.py").write_text(SUM)
    assert printed("-m", "nogpu.cuda", "--devices", "3", str(tmp_path / "sum.py")).split() == [
        "6.0",
        "3",
    ]


def test_the_devices_that_are_visible(tmp_path):
    (tmp_path / "sum.py").write_text(SUM)
    command = ["-m", "nogpu.cuda", str(tmp_path / "sum.py")]
    assert printed(*command, CUDA_VISIBLE_DEVICES="3,5").split() == ["6.0", "2"]


@pytest.mark.long
def test_processes_of_torchrun(tmp_path):
    (tmp_path / "rank.py").write_text(f"import os\n{SUM}\nprint('rank', os.environ['RANK'])\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "rank.py")]
    lines = printed("-m", "nogpu.cuda", "--devices", "2", *launcher).splitlines()
    assert sorted(lines) == ["6.0 2", "6.0 2", "rank 0", "rank 1"]


@pytest.mark.long
def test_workers_of_a_loader_that_are_spawned(tmp_path):
    (tmp_path / "loads.py").write_text("""
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.cuda.device_count()

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="spawn")
    print([int(count) for count in loader])
""")
    found = printed("-m", "nogpu.cuda", "--devices", "3", str(tmp_path / "loads.py"))
    assert found.split("\n")[-2] == "[3, 3, 3, 3]"


@pytest.mark.long
def test_the_report_says_that_it_is_a_stand_in():
    (line,) = [
        line
        for line in printed("-m", "nogpu.cuda", "-m", "dataparallel").splitlines()
        if line.startswith("accelerator")
    ]
    assert line.startswith("accelerator   cuda, 8 devices of a stand-in:")
