"""torch on a stand-in: how a program starts it, what its devices are like, and the processes that have it too."""

import pytest

from processes import run_script
from stand_in import IN_OWN_PROCESSES, WHY_NOT

pytestmark = IN_OWN_PROCESSES


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What takes minutes is done before the first test, which the watchdog counts."""
    if WHY_NOT is None:
        run_script("from nogpu import cuda; cuda.stand_in(1)", timeout=900)


def test_a_forked_process_computes_whatever_other_threads_did_at_the_fork(printed):
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


def test_devices_are_what_they_are_like(printed, tmp_path):
    (tmp_path / "tells.py").write_text("""
import torch
found = torch.cuda.get_device_properties(1)
print(found.name, found.major, found.minor, found.total_memory == 24 * 2**30, found.multi_processor_count, sep=",")
print(torch.cuda.can_device_access_peer(0, 1))
""")
    command = ["-m", "nogpu.cuda", "--devices", "2", "--like", "rtx_3090", str(tmp_path / "tells.py")]
    properties, peers = printed(*command).splitlines()
    assert properties == "NVIDIA GeForce RTX 3090 (stand-in, no GPU),8,6,True,82"
    assert peers == "False"


def test_a_second_call_asks_for_the_same_or_is_refused(printed):
    script = """
from nogpu import cuda
assert cuda.stand_in(2) == cuda.stand_in(2)
for change in ({"devices": 3}, {"devices": 2, "like": "h100"}):
    try:
        cuda.stand_in(**change)
    except ValueError as error:
        print(error)
"""
    other_number, other_kind = printed("-c", script).splitlines()
    assert other_number.startswith("this process has 2 devices like 'a100' already, which cannot change")
    assert other_number.endswith("got 3 like 'a100'")
    assert other_kind.endswith("got 2 like 'h100'")


def test_processes_that_it_starts_have_it_once_they_import_the_same_torch(printed, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("print('another')")
    (tmp_path / "sitecustomize.py").write_text("print('its own')")
    script = """
import os, subprocess, sys
from nogpu import cuda
cuda.stand_in(2, like="v100")
def child(code, **changes):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **changes}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
assert child("import torch; print(torch.cuda.device_count(), 'V100' in torch.cuda.get_device_name())") == ["2", "True"]
assert child("import sys, json; print('torch' in sys.modules)") == ["False"]
assert child("from nogpu import cuda; print(len(cuda.stand_in(3)))") == ["3"]
assert child("import torch; print(torch.cuda.is_available())", NOGPU_STAND_IN="") == ["False"]
first, *rest = os.environ["PYTHONPATH"].split(os.pathsep)
assert child("import torch", PYTHONPATH=os.pathsep.join([first, sys.argv[1], *rest])) == ["its", "own", "another"]
of_child = "import sys, os; print(os.environ['PYTHONPATH'].count('inherited'), any('inherited' in p for p in sys.path))"
assert child(of_child) == ["1", "False"]
"""
    printed("-c", script, str(tmp_path))


@pytest.mark.long
def test_the_report_says_that_it_is_a_stand_in(printed):
    (line,) = [
        line
        for line in printed("-m", "nogpu.cuda", "-m", "dataparallel").splitlines()
        if line.startswith("accelerator")
    ]
    assert line.startswith("accelerator   cuda, 8 devices of a stand-in for CUDA")
