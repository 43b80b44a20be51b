"""A fork after worker threads were used: nothing hangs in the child, and nothing changes in the parent."""

import os
from collections.abc import Iterator

import pytest

from processes import Ahead, Job

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.devices("cpu"),  # its processes are its own: once is enough
]

PRELUDE = """
import os, signal, sys, threading, traceback, warnings
import torch
from torch import nn
from dataparallel import DataParallel, _torch
from dataparallel.threads.gang import Gang

warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads, which is what this is about
torch.manual_seed(0)


def in_child(job):
    '''Runs job in a fork; what it returns is the exit code. A child that hangs is ended by a signal.'''
    child = os.fork()
    if child == 0:
        code = 99
        try:
            signal.alarm(15)
            code = job() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status), f"the child ended by signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status)


def four():
    return [outcome.value for outcome in Gang([lambda i=i: i for i in range(4)], 4).run_tasks()]


module = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
model = DataParallel(module, ["cpu"] * 3)
x = torch.randn(300, 256)  # enough for torch to use several intra-op threads


def step():
    module.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return output.detach(), [p.grad.clone() for p in module.parameters()]


def same(left, right):
    torch.testing.assert_close(left, right)

"""


SCRIPTS = {
    "forward and backward in the child and the parent": """
torch.set_num_threads(4)
output, gradients = step()


def forward():
    assert torch.get_num_threads() == 1
    same(model(x), output)
    with torch.no_grad():
        same(model(x), output)


def backward():
    try:
        same(step()[1], gradients)
    except RuntimeError as error:
        assert "fork" in str(error), error


for _ in range(3):
    assert in_child(forward) == 0
    assert in_child(backward) == 0
    assert torch.get_num_threads() == 4
    same(step()[1], gradients)
""",
    "a fork while gangs run": """
over = threading.Event()


def user():
    while not over.is_set():
        assert four() == [0, 1, 2, 3]


users = [threading.Thread(target=user, daemon=True) for _ in range(3)]
for thread in users:
    thread.start()
for _ in range(20):
    assert in_child(lambda: 0 if four() == [0, 1, 2, 3] else 1) == 0
over.set()
for thread in users:
    thread.join(10)
    assert not thread.is_alive()
""",
    "data loader workers are forked as ever": """
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(4)
output, gradients = step()
loader = DataLoader(TensorDataset(x), batch_size=100, num_workers=2, multiprocessing_context="fork", timeout=15)
for _ in range(2):
    same(torch.cat([batch for (batch,) in loader]), x)
    assert torch.get_num_threads() == 4
    same(step(), (output, gradients))
    same(torch.cat([model(batch) for (batch,) in loader]).detach(), output)
""",
    # Adding them up while the child is made would wait for torch's threads, which the child does not have.
    "a fork while gradients wait on slots": """
from dataparallel.composable import replicate

torch.set_num_threads(4)
module = replicate(nn.Linear(600, 600), devices=["cpu", "cpu"])
x = torch.randn(64, 600)
for _ in range(2):
    module(x).sum().backward()
module.zero_grad()
with module.no_sync():
    module(x).sum().backward()
waiting = module.bias.grad.clone()


def child():
    assert torch.equal(module.bias.grad, waiting)
    module(x)
    assert torch.equal(module.bias.grad, 2 * waiting)  # added before the replicas are made anew


assert in_child(child) == 0
assert torch.equal(module.bias.grad, waiting)
module(x).sum().backward()
assert torch.equal(module.bias.grad, 4 * waiting)
""",
}
SHORT = "forward and backward in the child and the parent"


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    with Ahead(request, tmp_path_factory.mktemp("ahead"), lambda name: Job(PRELUDE + SCRIPTS[name])) as ahead:
        yield ahead


@pytest.mark.parametrize(
    "name",
    [pytest.param(SHORT, marks=[pytest.mark.ahead(SHORT), pytest.mark.smoke])]
    + [pytest.param(name, marks=pytest.mark.ahead(name)) for name in SCRIPTS if name != SHORT],
)
def test_fork(name: str, printed: str) -> None:
    assert printed == ""
