"""Processes with simulated devices that fork, and threads that start, end and are freed in them."""

import pytest

from processes import ahead

# These tests start their own processes, so one kind of devices is enough.
pytestmark = pytest.mark.devices("cpu")


PROGRAMS = """
#: a forked child runs forward
import os, signal, traceback, warnings
import torch
from torch import nn
from dataparallel import DataParallel
from nogpu import simulate

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
"""


@ahead(PROGRAMS)
def test_program(available, name, printed):
    assert printed == ""


LONG_PROGRAMS = """
#: a forked child frees while threads of its parent launch
# No lock stays locked in the child by a thread that the child does not have.
import os, signal, threading, warnings
import torch
from nogpu import simulate

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
"""


@pytest.mark.long
@ahead(LONG_PROGRAMS)
def test_long_program(available, name, printed):
    assert printed == ""
