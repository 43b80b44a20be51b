"""When `simulate` may be called, what it refuses and with which words, and how a process with it ends or forks."""

import os
import subprocess
import sys

import pytest

from dataparallel.testing import simulate
from processes import Ahead, attempt, environment

# Their processes are their own: once is enough.
pytestmark = pytest.mark.devices("cpu")


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    attempt()
    with Ahead(request, tmp_path_factory.mktemp("ahead")) as ahead:
        yield ahead


@pytest.mark.ahead("""
import pytest, torch
from dataparallel.testing import simulate


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
""")
def test_more_devices_may_be_asked_for_later_and_fewer_may_not(available, printed):
    assert printed == ""


@pytest.mark.parametrize("number", [0, -1, 65])
def test_numbers_out_of_range_are_refused(number):
    with pytest.raises(ValueError, match=f"1 to 64 devices can be simulated; got {number}"):
        simulate(number)


@pytest.mark.parametrize("number", ["3", True, 2.0, None])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(TypeError, match=f"a number of devices, an int; got {type(number).__name__}"):
        simulate(number)


@pytest.mark.ahead("""
import pytest, torch
from dataparallel.testing.simulated import SimulationTooLate, simulate

torch.ones(1, requires_grad=True).sum().backward()
with pytest.raises(SimulationTooLate, match="a backward has run in this process before simulate.*call simulate first"):
    simulate(2)
x = torch.ones(1, requires_grad=True)
x.sum().backward()  # the CPU's is as it was
assert x.grad.item() == 1
with pytest.raises(SimulationTooLate, match="a backward has run in this process before simulate"):
    simulate(2)
""")
def test_a_backward_before_is_told_each_time(available, printed):
    assert printed == ""


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
from dataparallel.testing.simulated import SimulationTooLate, SimulationUnavailable, simulate

with mock.patch("torch.cuda.is_initialized", lambda: True):
    with pytest.raises(SimulationTooLate, match="CUDA has been initialised in this process.*call simulate before"):
        simulate(2)

torch.utils.rename_privateuse1_backend("other")
torch._register_device_module("other", types.ModuleType("other"))
with pytest.raises(SimulationUnavailable, match="another backend, 'other', has torch's PrivateUse1 slot"):
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
from dataparallel.testing import simulate
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
from dataparallel.testing import simulate

devices = simulate(8)
x = torch.ones(64, 64, requires_grad=True)
sum((x.to(device) @ x.to(device)).sin().sum().to("sim:0") for device in devices).backward()
"""


def test_a_script_that_ends_right_after_a_backward_ends_well(available):
    """Threads of the autograd engine may still be dropping graphs then.

    Interpreters of their own: forked from one that had imported torch, none of 80 ended badly without the wait at exit.
    """
    command = [sys.executable, "-c", ENDS_AFTER_A_BACKWARD]
    ending = [
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    outputs = [process.communicate(timeout=60) for process in ending]
    assert [process.returncode for process in ending] == [0] * 5, outputs
    assert outputs == [("", "")] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.ahead("""
import os, signal, traceback, warnings
import torch
from torch import nn
from dataparallel import DataParallel
from dataparallel.testing import simulate

warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads, which is what this is about
devices = simulate(2)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(devices[0])
x = torch.randn(6, 4, device=devices[0])
model(x).sum().backward()
expected = DataParallel(model)(x).detach().cpu()


def child():
    with torch.no_grad():
        torch.testing.assert_close(model(x).cpu(), expected)
    y = torch.ones(3, device=devices[1])
    assert (y.to(devices[0]) + 1).tolist() == [2, 2, 2]
    torch.testing.assert_close(DataParallel(model)(x).detach().cpu(), expected)
    torch.sim.check_clocks()


pid = os.fork()
if pid == 0:
    code = 99
    try:
        signal.alarm(20)
        child()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
status = os.waitpid(pid, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
""")
def test_a_forked_child_runs_forward(available, printed):
    assert printed == ""


@pytest.mark.ahead("""
import torch
from torch import nn
from dataparallel.testing import simulate

(device,) = simulate(1)
model = nn.Sequential(nn.Embedding(5, 3), nn.LazyLinear(3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
model(torch.arange(5))
model[3].weight = model[0].weight
model[0].weight.note = "mine"
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, value = list(model.parameters()), model[0].weight.detach().clone()
fired = []
model[0].weight.register_hook(lambda gradient: fired.append(gradient.device))
model(torch.arange(5)).sum().backward()  # a gradient that moves as well
address = model[0].weight.data_ptr()

model.to("sim")
assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
assert model[3].weight is model[0].weight and model[0].weight.note == "mine"
assert {t.device for t in [*before, *model.buffers(), *(p.grad for p in before)]} == {device}
assert torch.equal(model[0].weight.cpu(), value) and model[0].weight.data_ptr() != address

optimizer.zero_grad()
fired.clear()
model(torch.arange(5, device=device)).sin().sum().backward()
assert fired == [device]
optimizer.step()
assert not torch.equal(model[0].weight.cpu(), value)
assert torch.equal(model[3].weight, model[0].weight)

model.cpu()
assert all(now is then and now.device.type == "cpu" for now, then in zip(model.parameters(), before, strict=True))
optimizer.zero_grad()
model(torch.arange(5)).sum().backward()
optimizer.step()
del optimizer, model, before
import gc
gc.collect()
assert torch.sim.memory_allocated(device) == 0

# lazy modules move before their first forward
model = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyBatchNorm1d()).to("sim:0")
model(torch.randn(4, 7, device="sim:0")).sum().backward()
assert {p.device.type for p in model.parameters()} == {"sim"}
assert {p.grad.device.type for p in model.parameters()} == {"sim"}
""")
def test_a_module_that_moves_keeps_its_parameters(available, printed):
    """As on CUDA: the same objects, so ties, optimizers, hooks and gradients stay."""
    assert printed == ""


@pytest.mark.ahead("""
from unittest import mock
import pytest, torch
from dataparallel.testing import SimulationUnavailable, ToolsMissing, simulate

with mock.patch("dataparallel.testing.simulated.threads.carry_knowledge", side_effect=KeyError("the cause")):
    with pytest.raises(KeyError):
        simulate(2)
for _ in range(2):
    with pytest.raises(SimulationUnavailable, match="ended half-way.*no second try: KeyError.*the cause") as again:
        simulate(2)
    assert not isinstance(again.value, ToolsMissing)
    assert isinstance(again.value.__cause__, KeyError)
assert torch.sim.device_count() == 0
""")
def test_a_start_that_failed_half_way_is_told_each_time(available, printed):
    assert printed == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.ahead("""
import os, signal, threading, warnings
import torch
from dataparallel.testing import simulate

warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads, which is what this is about
torch.set_num_threads(1)
devices = simulate(2)
inherited = torch.ones(1000, device=devices[0])
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
            signal.alarm(5)  # ends it where it hangs
            del inherited
            torch.ones(1000, device=devices[1])
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
""")
def test_a_forked_child_frees_while_threads_of_its_parent_launch(available, printed):
    """No lock of a thread that the child does not have stays locked in it."""
    assert printed == ""


@pytest.mark.ahead("""
import threading
from unittest import mock
import pytest, torch
from dataparallel.testing import simulate

(device,) = simulate(1)
name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
results = []
x = torch.ones(3, device=device)
side = torch.Stream(device)
thread = threading.Thread(target=lambda: results.append((x + 1).tolist()))
with mock.patch.object(threading, name, side_effect=RuntimeError("can't start new thread")):
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
assert not thread.is_alive() and threading.enumerate() == [threading.main_thread()]
with side:  # what this thread waits for after the first attempt is known to the second one
    side.wait_stream(torch.sim.default_stream(device))
    x.add_(1)
side.synchronize()
thread.start()
thread.join()
assert results == [[3, 3, 3]]
""")
def test_a_thread_that_could_not_start_can_be_started_again(available, printed):
    assert printed == ""


@pytest.mark.ahead("""
import gc, threading, weakref
import torch
from dataparallel.testing import simulate

(device,) = simulate(1)
gc.disable()


def work():
    torch.ones(3, device=device).add_(1)
    torch.sim.synchronize(device)


class Worker(threading.Thread):
    def run(self):
        work()


for make in (lambda: threading.Thread(target=work), Worker):
    thread = make()
    thread.start()
    thread.join()
    assert not thread.is_alive()
    gone = weakref.ref(thread)
    del thread
    assert gone() is None
    never_started = make()
    gone = weakref.ref(never_started)
    del never_started
    assert gone() is None
""")
def test_threads_are_freed_when_they_have_run_without_a_collection(available, printed):
    assert printed == ""


@pytest.mark.ahead("""
import threading
import torch
from dataparallel.testing import simulate

(device,) = simulate(1)
x = torch.zeros(3, device=device)
main, side = torch.sim.current_stream(device), torch.Stream(device)


class Worker(threading.Thread):
    def run(self):
        raise AssertionError("the instance has its own")


def run():
    with side:
        x.add_(1)  # the starter has waited for what wrote it
    side.synchronize()


main.synchronize()
worker = Worker()
worker.run = run
worker.start()
worker.join()
x.add_(1)  # and this thread for the worker, which has waited
assert x.tolist() == [2, 2, 2]
""")
def test_a_thread_whose_instance_has_its_own_run_hands_its_knowledge_on(available, printed):
    assert printed == ""
