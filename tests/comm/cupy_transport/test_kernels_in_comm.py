"""With ``transport="cupy"``, kernels serve every call of ``comm`` that they support, those of kept replicas included.

Simulated devices are taken for CUDA's here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from alike import assert_alike, made
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm import transport_choice
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.transport_choice import Choice
from dataparallel.composable import replicate

pytestmark = [pytest.mark.slots(3), pytest.mark.devices("sim")]


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``transport="cupy"`` means for CUDA devices holds for simulated ones."""

    def choose(work: str, *known: object) -> Choice:
        if work in transport_choice.SUPPORTED:
            return Choice("cupy", "star", "these devices are taken for CUDA's")
        return Choice("copy", "star", "cupy does not support it")

    transport_choice.forget()
    monkeypatch.setattr(transport_choice.kernels, "why_not", lambda devices: None)
    monkeypatch.setattr(transport_choice, "choose", choose)
    yield
    transport_choice.forget()


class Calls:
    """What `comm` can be asked for, with tensors of a kind on each slot, and room for them."""

    def __init__(self, slots: list, make: Callable[[torch.device], list[Tensor]]) -> None:
        self.slots = slots
        self.on_slots = [make(slot) for slot in slots]
        self.out = [[torch.zeros_like(tensor) for tensor in tensors] for tensors in self.on_slots[1:]]

    def broadcast(self) -> list[Tensor]:
        return [copy for tensor in self.on_slots[0] for copy in comm.broadcast(tensor, self.slots)]

    def broadcast_into(self) -> list[Tensor]:
        pairs = zip(self.on_slots[0], zip(*self.out, strict=True), strict=True)
        return [copy for tensor, out in pairs for copy in comm.broadcast(tensor, out=out)]

    def broadcast_coalesced(self) -> list[Tensor]:
        return [copy for copies in comm.broadcast_coalesced(self.on_slots[0], self.slots) for copy in copies]

    def reduce_add(self) -> list[Tensor]:
        return [comm.reduce_add(terms) for terms in zip(*self.on_slots, strict=True)]

    def reduce_add_coalesced(self) -> list[Tensor]:
        return [*comm.reduce_add_coalesced(self.on_slots)]

    def add_flat(self) -> list[Tensor]:
        flats = [torch.cat([tensor.flatten() for tensor in tensors]) for tensors in self.on_slots]
        return [comm.add_flat(flats, torch.device(self.slots[0]))]


def plain(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(4, 3, generator=generator), torch.randn(7, generator=generator)]
    return [tensor.to(device) for tensor in (*made, made[0].t().contiguous().t(), torch.tensor(3.0))]


CALLS = {
    "broadcast": {"copy_many": 8},
    "broadcast_into": {"copy_many": 2},
    "broadcast_coalesced": {"copy_many": 2},
    "reduce_add": {"sum": 4},
    "reduce_add_coalesced": {"sum": 1},
    "add_flat": {"sum": 1},
}


@pytest.mark.parametrize("name", CALLS)
def test_comm_uses_it_in_every_call_where_it_is_asked_for(
    name: str, asked_for: None, launches: Counter, slots: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = getattr(Calls(slots, plain), name)()
    assert launches == CALLS[name]
    monkeypatch.setattr(comm, "transport_for", lambda work, devices, tensors, cap_bytes=0: STAR)
    assert_alike(found, getattr(Calls(slots, plain), name)())


@pytest.mark.parametrize("name", [name for name in CALLS if name != "add_flat"])
def test_plain_copies_do_what_it_cannot(
    name: str, asked_for: None, slots: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(device: torch.device) -> list[Tensor]:
        # Simulated devices copy nothing sparse into what another has.
        return [tensor for tensor in made(device) if name != "broadcast_into" or not tensor.is_sparse]

    found = getattr(Calls(slots, make), name)()
    monkeypatch.setattr(comm, "transport_for", lambda work, devices, tensors, cap_bytes=0: TorchCopies("chain"))
    assert_alike(found, getattr(Calls(slots, make), name)())


def stay_here(route: TorchCopies, source: Tensor, buffers: Sequence[Tensor]) -> None:
    """In the place of plain copies, which only slots on one device make."""
    for buffer in buffers:
        assert buffer.device == source.device, "a plain copy between devices"
        buffer.copy_(source)


@pytest.mark.parametrize("form", ["DataParallel", "replicate"])
def test_kept_replicas_are_refreshed_by_kernels(
    form: str, asked_for: None, launches: Counter, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval().to(root)
    alone = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval().to(root)
    small = {"bucket_cap_mb": 1e-5}
    model = DataParallel(net, slots) if form == "DataParallel" else replicate(net, devices=slots, **small)
    x = torch.randn(6, 4, device=root)
    with torch.no_grad():
        model(x)
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.add_(1)
        launches.clear()
        with monkeypatch.context() as patch:
            patch.setattr(TorchCopies, "broadcast_flat", stay_here)
            output = model(x)
        alone.load_state_dict(net.state_dict())
        torch.testing.assert_close(output, alone(x))
    assert launches["copy_many"] >= 1
