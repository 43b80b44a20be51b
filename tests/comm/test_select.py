"""A transport that was asked for serves what it supports, and plain copies the rest; untrusted copies go by the host.

The choice is tried on CUDA devices of which only the names exist. For whole steps simulated devices are taken for
CUDA's, and plain copies play NCCL.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from nccl_stand_in import Library
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm import kernels, nccl, peers, transport_choice
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import TorchCopies
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
        monkeypatch.setattr(
            kernels, "why_not", lambda devices: self.asked.append("cupy's files" if devices is None else "cupy")
        )
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pure
@pytest.mark.parametrize(
    ("said", "asked"),
    [({}, []), ({"route": "chain"}, []), ({"transport": "nccl"}, ["nccl"]), ({"transport": "cupy"}, ["cupy's files"])],
)
def test_the_report_asks_for_files_only_and_of_what_was_asked_for(said: dict, asked: list, machine: Machine) -> None:
    with comm.using(**said):
        assert comm.choose_transport(machine.devices).transport == said.get("transport", "copy")
        assert comm.choose_transport(machine.devices, work="gather").transport == "copy"
    assert machine.asked == asked


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
def test_slots_on_one_device_train_too(name: str, slots: list, taken_for_cuda: Library, launches: Counter) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).to(slots[0]), torch.randn(6, 4)
    places = [slots[0], slots[0], slots[-1]]
    with comm.using(transport=name, deterministic=False):
        found = step(DataParallel(net, places), net, x)
    if slots[0] != slots[-1]:
        assert taken_for_cuda.calls or launches
    assert all(map(torch.equal, found, step(DataParallel(net, places), net, x)))


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(3)
@pytest.mark.apart
def test_copies_that_cannot_be_trusted_go_through_the_host(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def garbage(source: Tensor, target: Tensor) -> None:
        target.fill_(0)

    peers.forget()
    monkeypatch.setattr(torch.get_device_module(slots[0]), "copies_cannot_fail", False, raising=False)
    monkeypatch.setattr(peers, "_copy", garbage)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            transport = transport_for("broadcast", slots, LARGE)
        assert isinstance(transport, ThroughHost)
        assert len(caught) == 6
        tensors = [torch.randn(3, 4, device=slots[0]), torch.arange(5, device=slots[0])]
        for on_slot in comm.broadcast_coalesced(tensors, slots):
            assert all(torch.equal(copy.cpu(), tensor.cpu()) for copy, tensor in zip(on_slot, tensors, strict=True))
        (total,) = comm.reduce_add_coalesced([[torch.ones(4, device=slot)] for slot in slots])
        assert torch.equal(total.cpu(), torch.full((4,), 3.0))
        chunks = comm.scatter(torch.arange(6.0, device=slots[0]), slots)
        assert torch.equal(comm.gather(chunks, 0, slots[0]).cpu(), torch.arange(6.0))
    finally:
        peers.forget()


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(3)
@pytest.mark.apart
def test_a_whole_step_takes_the_route_of_its_forward(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums run in threads of the engine, which do not have the caller's context."""
    taken: list[tuple[str, bool]] = []

    def note(self: TorchCopies, *args: Any) -> Any:
        taken.append((self.route, threading.current_thread() is threading.main_thread()))
        return add_up(self, *args)

    add_up = TorchCopies.add_up
    monkeypatch.setattr(TorchCopies, "add_up", note)
    model = DataParallel(nn.Linear(4, 3).to(slots[0]), slots)
    x = torch.randn(6, 4, device=slots[0])
    with comm.using(route="chain"):
        loss = model(x).square().sum()
    loss.backward()
    assert taken
    assert {*taken} == {("chain", False)}
