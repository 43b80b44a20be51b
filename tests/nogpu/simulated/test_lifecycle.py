"""When `simulate` may be called, which errors it raises, and how a process with simulated devices ends."""

import subprocess
import sys

import pytest

from nogpu import simulate
from processes import ahead, environment

# These tests start their own processes, so one kind of devices is enough.
pytestmark = pytest.mark.devices("cpu")


PROGRAMS = """
#: more devices may be asked for later and fewer may not
import pytest, torch
from nogpu import simulate


def backward(device):
    x = torch.ones(3, device=device, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.device == device
    assert x.grad.tolist() == [2, 2, 2]


first = simulate(2)
assert first == [torch.device("sim:0"), torch.device("sim:1")]
for device in first:
    backward(device)
with pytest.raises(RuntimeError, match="sim:2"):
    torch.ones(1, device="sim:2")

assert len(simulate(4)) == 4 == torch.sim.device_count() == torch.accelerator.device_count()
for device in simulate(4):
    backward(device)
with pytest.raises(ValueError, match="4 devices are simulated already.*ask for 4 or more; got 3"):
    simulate(3)
assert torch.sim.device_count() == 4

assert simulate(64)[-1] == torch.device("sim:63")
backward(torch.device("sim:63"))
backward(first[0])
#: a backward before is told each time
import pytest, torch
from nogpu.simulated import SimulationTooLate, simulate

torch.ones(1, requires_grad=True).sum().backward()
with pytest.raises(SimulationTooLate, match="a backward has run in this process before simulate.*call simulate first"):
    simulate(2)
with pytest.raises(SimulationTooLate, match="a backward has run in this process before simulate"):
    simulate(2)
#: a module that moves keeps its parameters
# As on CUDA the parameter objects stay, and with them ties, optimizers, hooks and gradients.
import torch
from torch import nn
from nogpu import simulate

(device,) = simulate(1)
model = nn.Sequential(nn.Embedding(5, 3), nn.LazyLinear(3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
model(torch.arange(5))
model[3].weight = model[0].weight
before, value = list(model.parameters()), model[0].weight.detach().clone()
fired = []
model[0].weight.register_hook(lambda gradient: fired.append(gradient.device.type))
model(torch.arange(5)).sum().backward()  # a gradient that moves as well

model.to("sim")
assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
assert model[3].weight is model[0].weight
assert {t.device for t in [*before, *model.buffers(), *(p.grad for p in before)]} == {device}
assert torch.equal(model[0].weight.cpu(), value)
model(torch.arange(5, device=device)).sin().sum().backward()
model.cpu()
assert all(now is then and now.device.type == "cpu" for now, then in zip(model.parameters(), before, strict=True))
assert fired == ["cpu", "sim"]

# lazy modules move before their first forward
model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyBatchNorm1d()).to("sim:0")
model(torch.randn(4, 7, device="sim:0")).sum().backward()
assert {p.grad.device.type for p in model.parameters()} == {"sim"}
#: a forked child frees while threads of its parent launch
# No lock stays locked in the child by a thread that the child does not have. The child computes, without autograd.
import os, signal, threading, warnings
import torch
from torch import nn
from dataparallel import DataParallel
from nogpu import simulate

warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads, which is what this is about
torch.set_num_threads(1)
devices = simulate(2)
inherited = torch.ones(1000, device=devices[0])
model = DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(devices[0]))
x = torch.randn(6, 4, device=devices[0])
model(x).sum().backward()
expected = model(x).detach().cpu()
torch.sim.synchronize(devices[0])
over = threading.Event()


def launch(device):
    x = torch.ones(10, device=device)
    while not over.is_set():
        x = x + 1


threads = [threading.Thread(target=launch, args=[device]) for device in devices]
for thread in threads:
    thread.start()
ended = []
for _ in range(100):
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)  # ends it where it hangs
            del inherited
            torch.ones(1000, device=devices[1])
            if not ended:
                with torch.no_grad():
                    torch.testing.assert_close(model.module(x).cpu(), expected)
                torch.testing.assert_close(model(x).detach().cpu(), expected)
                torch.sim.check_clocks()
        except BaseException:
            os._exit(99)
        os._exit(0)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if ended[-1]:
        break
over.set()
for thread in threads:
    thread.join()
assert ended == [0] * 100, ended
"""


@ahead(PROGRAMS)
def test_program(available, name, printed):
    assert printed == ""


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        *((number, ValueError, f"1 to 64 devices can be simulated; got {number}") for number in (0, -1, 65)),
        *((number, TypeError, "a number of devices, an int; got") for number in ("3", True, 2.0, None)),
    ],
)
def test_what_is_no_number_of_devices_is_refused(number, error, words):
    with pytest.raises(error, match=words):
        simulate(number)


IN_AN_EMPTY_FOLDER = """
import os, tempfile
folder = tempfile.TemporaryDirectory()
os.environ["TORCH_EXTENSIONS_DIR"] = folder.name
"""


@pytest.mark.ahead(
    IN_AN_EMPTY_FOLDER
    + """
import sys, types
from unittest import mock
import pytest, torch
from nogpu.simulated import SimulationTooLate, SimulationUnavailable, simulate

with mock.patch("torch.cuda.is_initialized", lambda: True):
    with pytest.raises(SimulationTooLate, match="CUDA has been initialised in this process.*call simulate before"):
        simulate(2)

torch.utils.rename_privateuse1_backend("other")
torch._register_device_module("other", types.ModuleType("other"))
with pytest.raises(SimulationUnavailable, match="the backend 'other' has torch's PrivateUse1 slot"):
    simulate(2)
assert os.listdir(folder.name) == []
assert not hasattr(torch, "sim")
"""
)
def test_other_accelerators_of_the_process_are_told_before_anything_is_compiled(printed):
    assert printed == ""


@pytest.mark.ahead(
    IN_AN_EMPTY_FOLDER
    + """
import sys, threading
import torch
start, switches = threading.Thread.start, torch._has_compatible_shallow_copy_type
import dataparallel, dataparallel.testing
from nogpu import simulate
assert not hasattr(torch, "sim")
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
assert "torch.utils.cpp_extension" not in sys.modules
assert threading.Thread.start is start and torch._has_compatible_shallow_copy_type is switches
assert threading.enumerate() == [threading.main_thread()]
assert os.listdir(folder.name) == []
"""
)
def test_import_simulates_and_compiles_nothing(printed):
    assert printed == ""


ENDS_AFTER_A_BACKWARD = """
import torch
from nogpu import simulate

devices = simulate(8)
x = torch.ones(64, 64, requires_grad=True)
sum((x.to(device) @ x.to(device)).sin().sum().to("sim:0") for device in devices).backward()
"""


@pytest.mark.long
def test_a_script_that_ends_right_after_a_backward_ends_well(available):
    """Threads of the autograd engine may still be freeing graphs then.

    It needs new interpreters: of 80 that were forked after the import of torch, none failed without the wait at exit.
    """
    command = [sys.executable, "-c", ENDS_AFTER_A_BACKWARD]
    ending = [
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    outputs = [process.communicate(timeout=100) for process in ending]
    assert [process.returncode for process in ending] == [0] * 5, outputs
    assert outputs == [("", "")] * 5
