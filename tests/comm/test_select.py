"""The transport of a call, and the source of its settings."""

import threading
import warnings
from typing import Any

import pytest
import torch
from tensor_kinds import devices_of
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm import peers
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.transport_choice import transport_for

pytestmark = pytest.mark.usefixtures("forgetful")
LARGE, SMALL = [torch.empty(2**27, device="meta")], [torch.empty(10)]
BUCKET = [torch.empty(10 * 2**18)]


@pytest.mark.devices("sim")
@pytest.mark.slots(8)
def test_the_librarys_choice(slots: list) -> None:
    devices = devices_of(slots)
    if len({*devices}) < len(devices):
        pytest.skip("slots share devices")
    assert transport_for("broadcast", devices, LARGE).route == "chain"
    assert transport_for("broadcast", devices, SMALL) == STAR
    assert transport_for("reduce_add", devices, BUCKET).route == "chain"
    assert transport_for("reduce_add", devices, SMALL) == STAR
    assert transport_for("gather", devices, LARGE) == transport_for("scatter", devices, LARGE) == TorchCopies("star")
    assert transport_for("broadcast", devices[:2], LARGE) == TorchCopies("star")


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(3)
def test_copies_that_cannot_be_trusted_go_through_the_host(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def garbage(source: Tensor, target: Tensor) -> None:
        target.fill_(0)

    peers.forget()
    monkeypatch.setattr(torch.get_device_module(slots[0]), "copies_cannot_fail", False, raising=False)
    monkeypatch.setattr(peers, "_copy", garbage)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            transport = transport_for("broadcast", devices_of(slots), LARGE)
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
