"""A transport that was asked for serves what it supports; the rest falls back to plain copies, so a whole step works.

The choice is tried on CUDA devices of which only the names exist. For whole steps simulated devices are taken for
CUDA's, and plain copies play NCCL.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from nccl_stand_in import Library
from torch import nn

from dataparallel import DataParallel, comm
from dataparallel.comm import kernels, nccl, transport_choice
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import STAR
from dataparallel.comm.settings import TRANSPORT_VARIABLE
from dataparallel.comm.transport_choice import Choice, Collective, choose, transport_for

LARGE, SMALL = [torch.empty(2**20)], [torch.empty(10)]
CPU = torch.device("cpu")
NAMES = {"nccl": nccl.Nccl, "cupy": Cupy}


def pure(test: object) -> object:
    """For tests without slots: one run is enough."""
    return pytest.mark.devices("cpu")(test)


pytestmark = pytest.mark.usefixtures("forgetful")


class Machine:
    """Eight CUDA devices, where NCCL and CuPy are installed. Only their names exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = [torch.device("cuda", index) for index in range(8)]
        self.asked: list[str] = []
        monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", "0")
        monkeypatch.setattr(nccl, "why_not", lambda: self.asked.append("nccl"))
        monkeypatch.setattr(kernels, "why_not", lambda devices: self.asked.append("cupy"))
        monkeypatch.setattr(kernels, "why_not_installed", lambda: self.asked.append("cupy's files"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pure
@pytest.mark.parametrize("name", NAMES)
def test_a_transport_that_is_asked_for_serves_what_it_supports(name: str, machine: Machine) -> None:
    with comm.using(transport=name, deterministic=False):
        for tensors in (LARGE, SMALL):
            assert isinstance(transport_for("broadcast", machine.devices, tensors), NAMES[name])
            assert isinstance(transport_for("reduce_add", machine.devices, tensors), NAMES[name])
    assert machine.asked == [name]


@pure
@pytest.mark.parametrize("name", NAMES)
def test_what_it_does_not_support_goes_by_plain_copies(name: str, machine: Machine) -> None:
    with_cpu = [CPU, *machine.devices]
    with comm.using(transport=name):
        assert transport_for("gather", machine.devices, LARGE) == STAR
        assert transport_for("gather", with_cpu, LARGE) == STAR
        assert transport_for("scatter", with_cpu, LARGE) == STAR
        assert transport_for("reduce_add", with_cpu, LARGE) == STAR
        assert transport_for("broadcast", with_cpu, LARGE) == STAR
        assert transport_for("broadcast", with_cpu[:2], LARGE) == STAR


@pure
def test_cupy_is_refused_where_its_room_says_so_of_the_calls_devices(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda devices: "no peers" if machine.devices[2] in devices else None)
    with comm.using(transport="cupy"):
        assert isinstance(transport_for("broadcast", machine.devices[:2], LARGE), Cupy)
        with pytest.raises(ValueError, match=r"'cupy' was asked for .*: no peers"):
            transport_for("broadcast", machine.devices[:3], LARGE)


@pure
@pytest.mark.parametrize("asked", [{}, {"transport": "copy"}, {"transport": "host"}, {"route": "chain"}])
def test_of_one_that_nobody_has_asked_for_nothing_is_asked(asked: dict, machine: Machine) -> None:
    with comm.using(**asked):
        for work in ("broadcast", "reduce_add", "gather", "scatter"):
            transport_for(work, machine.devices, LARGE)
            comm.choose_transport(machine.devices, work=work)
    assert machine.asked == []


@pure
@pytest.mark.parametrize(("name", "asked"), [("nccl", "nccl"), ("cupy", "cupy's files")])
def test_the_report_asks_for_files_only(name: str, asked: str, machine: Machine) -> None:
    with comm.using(transport=name):
        assert comm.choose_transport(machine.devices).transport == name
        assert comm.choose_transport(machine.devices, work="gather").transport == "copy"
    assert machine.asked == [asked]


@pytest.fixture
def taken_for_cuda(launches: Counter, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Simulated devices are CUDA's for the choice, and NCCL and CuPy are installed."""

    def choose_for_cuda(work: Collective, devices: Sequence[torch.device], *known: Any) -> Choice:
        named = [torch.device("cuda", device.index) if device.type != "cpu" else device for device in devices]
        return choose(work, named, *known)

    library = Library()
    monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", "0")
    monkeypatch.setattr(transport_choice, "choose", choose_for_cuda)
    monkeypatch.setattr(nccl, "why_not", lambda: None)
    monkeypatch.setattr(nccl, "nccl", library)
    monkeypatch.setattr(kernels, "why_not", lambda devices: None)
    return library


def step(model: nn.Module, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    y = model(x)
    y.abs().square().sum().backward()
    return [y.detach().cpu(), *(parameter.grad.cpu() for parameter in net.parameters())]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.devices("sim")
@pytest.mark.slots(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_environment_alone_trains(
    name: str,
    deterministic: bool,
    dtype: torch.dtype,
    slots: list,
    taken_for_cuda: Library,
    launches: Counter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a batch on the CPU to outputs gathered there."""
    if len({*slots}) < len(slots):
        pytest.skip("slots share devices")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(slots[0], dtype)
    net.register_buffer("counts", torch.arange(5, dtype=torch.int16, device=slots[0]))
    x = torch.randn(6, 4, dtype=dtype)
    model = DataParallel(net, slots, output_device=-1)
    expected = step(model, net, x)
    monkeypatch.setenv(TRANSPORT_VARIABLE, name)
    with comm.using(deterministic=deterministic):
        found = step(model, net, x)
    assert all(map(torch.equal, found, expected))
    kinds = {kind for kind, *_ in taken_for_cuda.calls} | {*launches}
    sums = {"reduce"} if not deterministic and dtype is torch.float32 else set()
    assert kinds == ({"copy_many", "sum"} if name == "cupy" else {"broadcast", *sums})


@pytest.mark.devices("sim")
@pytest.mark.parametrize("name", NAMES)
def test_slots_on_one_device_train_too(
    name: str,
    slots: list,
    taken_for_cuda: Library,
    launches: Counter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).to(slots[0]), torch.randn(6, 4)
    places = [slots[0], slots[0], slots[-1]]
    monkeypatch.setenv(TRANSPORT_VARIABLE, name)
    with comm.using(deterministic=False):
        found = step(DataParallel(net, places), net, x)
    if slots[0] != slots[-1]:
        assert taken_for_cuda.calls or launches
    monkeypatch.delenv(TRANSPORT_VARIABLE)
    assert all(map(torch.equal, found, step(DataParallel(net, places), net, x)))
