"""`simulate(compute=False)`: launches, bytes and memory are those of the kernels, and what needs values raises.

Each process has kernels or has none, so everything here runs in processes of its own. Their steps are in
``planned_steps``.
"""

import json
import subprocess
import sys

import pytest

from processes import ahead, environment

# These tests start their own processes, so one kind of devices is enough.
pytestmark = pytest.mark.devices("cpu")

SHORT = ["images", "gpt", "bert", "lstm"]
LONG = ["operators", "images-channels_last", "images-autocast"]
cases = pytest.mark.parametrize("case", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])


@pytest.fixture(scope="module")
def steps(available: None, request: pytest.FixtureRequest) -> list[dict]:
    """The figures of the selected cases: with kernels, and without."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = sorted({spec.params["case"] for spec in specs if spec is not None and "case" in spec.params})
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "planned_steps", str(compute), *names],
            env=environment(DATAPARALLEL_SERIAL="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for compute in (True, False)
    ]
    told = []
    for process in running:
        printed, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        told.append(json.loads(printed))
    return told


@cases
def test_launches_bytes_memory_shapes_and_strides_are_those_of_the_kernels(steps: list[dict], case: str) -> None:
    computed, skipped = (told[case] for told in steps)
    for which, figures in computed.items():
        for figure, value in figures.items():
            assert skipped[which][figure] == value, (which, figure)


PROGRAMS = """
#: what needs values or has none of the shapes is refused by name
import pytest, torch
from nogpu import simulate

device = simulate(2, compute=False)[0]
x = torch.randn(4, 4, device=device)
mask = x > 0
refused = {
    "item": lambda: x[0, 0].item(),
    "aten::_local_scalar_dense": lambda: bool(x.sum()),
    "aten::nonzero": lambda: x.nonzero(),
    "aten::index with a mask": lambda: x[mask],
    "aten::_unique2": lambda: torch.unique(x),
    "aten::equal": lambda: torch.equal(x, x),
    "tolist": lambda: x.tolist(),
    "cpu": lambda: x.cpu(),
    "print": lambda: torch.zeros(3, dtype=torch.int64, device=device).to("cpu", non_blocking=True),
}
for name, operator in refused.items():
    before = torch.sim.memory_allocated(device)
    with torch.sim.counted() as counts, pytest.raises(RuntimeError, match="has no values") as raised:
        operator()
    assert name in str(raised.value) and "compute=True" in str(raised.value), (name, raised.value)
    assert not counts.copied, name
for shown in (repr, str):
    with pytest.raises(RuntimeError, match="has no values"):
        shown(x)
with pytest.raises(RuntimeError, match="aten::_to_sparse"):
    x.to_sparse()
with pytest.raises(RuntimeError, match="strided tensors only"):
    torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.int64, device=device), torch.ones(2, device=device), (4,)) * 2
torch.sim.check_clocks()
#: an operator without a meta kernel says what to do
import pytest, torch
from torch import Tensor
from nogpu import simulate

device = simulate(1, compute=False)[0]
library = torch.library.Library("shop", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
x = torch.ones(3, device=device)
with pytest.raises(NotImplementedError, match="torch has none for shop::twice.*torch.library.register_fake"):
    torch.ops.shop.twice(x)
torch.library.register_fake("shop::twice", lambda x: torch.empty_like(x))
y = torch.ops.shop.twice(x)
assert (y.shape, y.device) == (x.shape, device)
assert torch.sim.memory_allocated(device) == 24
#: memory that this machine lacks is counted against the capacity
import pytest, torch
from nogpu import simulate

device = simulate(1, compute=False)[0]
torch.sim.set_memory_capacity(2**40, device)
x = torch.empty(2**37, device=device)  # half of it
assert torch.sim.mem_get_info(device) == (2**39, 2**40)
with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 549755813888 bytes"):
    y = x + 1, x + 2
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(0, device=device).resize_(2**38)
del x
assert torch.sim.memory_allocated(device) == 0
#: the first call decides for the process
import pytest, torch
from nogpu import simulate

with pytest.raises(TypeError, match="compute is True or False; got 0"):
    simulate(1, compute=0)
simulate(1, compute=False)
with pytest.raises(ValueError, match="first simulate of this process had compute=False.*got compute=True"):
    simulate(2)
assert torch.sim.device_count() == 1
assert len(simulate(2, compute=False)) == 2
#: clocks devices generators and meta tensors of the user are as ever
import pytest, torch
from nogpu import simulate

one, two = simulate(2, compute=False)
torch.manual_seed(3)
state = torch.sim.get_rng_state(0)
with torch.device(one):
    x = torch.randn(2, 8).requires_grad_()
    y = torch.nn.functional.layer_norm(torch.nn.functional.dropout(x), (8,))
    y.sum().backward()
assert (y.device, x.grad.device, x.grad.shape) == (one, one, x.shape)
assert torch.equal(torch.sim.get_rng_state(0), state)  # nothing is drawn
with pytest.raises(RuntimeError, match="two devices, sim:0 and sim:1"):
    x + torch.ones(8, device=two)
with pytest.raises(RuntimeError, match="two devices, sim:0 and cpu"):
    x + torch.ones(8)
with pytest.raises(RuntimeError, match="race"), torch.Stream(one):
    y * 2
meta = torch.ops.aten._embedding_bag(
    torch.empty(6, 4, device="meta"),
    torch.empty(5, dtype=torch.int64, device="meta"),
    torch.empty(2, dtype=torch.int64, device="meta"),
)
assert meta[1].shape == (5,)  # as on CUDA: tensors of the user are told what torch tells them
"""


@ahead(PROGRAMS)
def test_program(available, name, printed):
    assert printed == ""


LONG_PROGRAMS = """
#: a step of gpt 2 xl on 8 devices stays below 1 and a half gibibytes
import resource, torch
from torch import nn
from dataparallel.composable import replicate
from dataparallel.testing import ModelArgs, Transformer
from nogpu import simulate

devices = simulate(8, compute=False)
model = Transformer(ModelArgs(48, 50257, 1024, 1600, 25, dropout_p=0.0), device="meta").to_empty(device=devices[0])
size = sum(p.numel() for p in model.parameters())
assert size > 1.5e9
replicate(model, devices=devices)
optimizer = torch.optim.AdamW(model.parameters())
output = model(torch.randint(0, 50257, (8, 1024)))
target = torch.zeros(8 * 1024, dtype=torch.int64, device=output.device)
nn.functional.cross_entropy(output.flatten(0, 1), target).backward()
del output
optimizer.step()
optimizer.zero_grad()
assert torch.sim.memory_allocated(devices[0]) >= 12 * size  # the weights and two moments
assert all(torch.sim.max_memory_allocated(device) >= 4 * size for device in devices)
mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
assert mebibytes < 1536, mebibytes
"""


@pytest.mark.long
@ahead(LONG_PROGRAMS)
def test_long_program(available, name, printed):
    assert printed == ""
