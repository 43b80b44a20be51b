"""The transport of a call, the source of its settings, and what becomes of a transport that brings other data."""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from tensor_kinds import devices_of
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm import compare, kernels, peers, select
from dataparallel.comm.cupy import Cupy
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import SUM_KERNELS
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.select import transport_for
from dataparallel.comm.settings import ROUTE_VARIABLE
from dataparallel.comm.transport import Transport

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "forgetful")
LARGE, SMALL = [torch.empty(2**27, device="meta")], [torch.empty(10)]
BUCKET = [torch.empty(10 * 2**18)]
EMBEDDING = [torch.empty(60 * 2**18, device="meta")]


def test_within_one_device_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "settings", None)
    assert transport_for("broadcast", [torch.device("cpu")] * 3, LARGE) is STAR


@pytest.mark.devices("sim")
@pytest.mark.slots(8)
def test_the_librarys_choice(slots: list) -> None:
    devices = devices_of(slots)
    if len({*devices}) < len(devices):
        pytest.skip("slots share devices")
    assert transport_for("broadcast", devices, LARGE).route == "chain"
    assert transport_for("broadcast", devices, SMALL) == TorchCopies("tree")
    assert transport_for("reduce_add", devices, BUCKET).route == "chain"
    assert transport_for("reduce_add", devices, EMBEDDING) == TorchCopies("shards")
    assert transport_for("reduce_add", devices, SMALL) == TorchCopies("chain", pieces=1)
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
@pytest.mark.parametrize("by", ["context", "environment"])
def test_a_whole_step_takes_the_route_of_its_forward(by: str, slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums run in threads of the engine, which do not have the caller's context."""
    taken: list[tuple[str, bool]] = []

    def note(self: TorchCopies, *args: Any) -> Any:
        taken.append((self.route, threading.current_thread() is threading.main_thread()))
        return add_up(self, *args)

    add_up = TorchCopies.add_up
    monkeypatch.setattr(TorchCopies, "add_up", note)
    model = DataParallel(nn.Linear(4, 3).to(slots[0]), slots)
    x = torch.randn(6, 4, device=slots[0])
    if by == "context":
        with comm.using(route="chain"):
            loss = model(x).square().sum()
    else:
        monkeypatch.setenv(ROUTE_VARIABLE, "chain")
        loss = model(x).square().sum()
    loss.backward()
    assert taken
    assert {*taken} == {("chain", False)}


class Faulty(Transport):
    """Copies with a fault, and adds with one."""

    def __init__(self, fault: str = "", add_up: Callable = STAR.add_up) -> None:
        self.fault = fault
        self.used = 0
        self._add_up = add_up

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        return self._add_up(flats, destination)

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        self.used += 1
        if self.fault == "raises":
            raise RuntimeError("no link")
        for buffer in buffers:
            buffer.copy_(source)
            if self.fault == "garbage":
                buffer[-1] += 1


@pytest.mark.parametrize(("fault", "why"), [("garbage", "other data"), ("raises", "it has failed: no link")])
@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
def test_a_transport_that_fails_its_first_comparison_is_dropped(fault: str, why: str, slots: list) -> None:
    theirs = Faulty(fault)
    devices = tuple(devices_of(slots))
    with pytest.warns(RuntimeWarning, match=rf"'theirs' is not used between .*{why}"):
        assert why in str(compare.why_unusable("theirs", theirs, devices))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why in str(compare.why_unusable("theirs", theirs, devices))
    assert theirs.used == 1


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
def test_one_that_does_not_stays(slots: list) -> None:
    state = torch.get_rng_state()
    assert compare.why_unusable("theirs", Faulty(), tuple(devices_of(slots))) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.devices("sim", "cuda")
@pytest.mark.slots(3)
def test_kernels_whose_copies_are_right_and_whose_sums_are_not_are_dropped(slots: list) -> None:
    def flushing(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
        small = [flat.abs() < torch.finfo(flat.dtype).smallest_normal for flat in flats]
        return STAR.add_up([flat.masked_fill(where, 0) for flat, where in zip(flats, small, strict=True)], destination)

    devices = tuple(devices_of(slots))
    with pytest.warns(RuntimeWarning, match=r"'cupy' is not used between .*: in torch.float32 it has made 0.0 of"):
        assert compare.why_unusable("cupy", Faulty(add_up=flushing), devices) is not None
    compare.forget()
    assert compare.why_unusable("cupy", Faulty(), devices) is None


def test_the_sums_that_are_compared_are_launches_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple] = []
    monkeypatch.setattr(kernels, "launch", lambda *arguments: launched.append(arguments))
    flats = [torch.ones(5, dtype=torch.bfloat16) for _ in range(3)]
    total = Cupy().add_up(flats, torch.device("cpu"))
    rows = [[tensor.data_ptr()] for tensor in (total, *flats)]
    assert launched == [(SUM_KERNELS[torch.bfloat16], rows, [5], torch.device("cpu"), [torch.device("cpu")] * 3)]


def test_a_device_is_listed_as_often_as_it_is_a_slot(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise transports that take each device once would refuse every call that begins or ends on a slot."""
    asked: list[list[torch.device]] = []

    def ask(work: str, devices: Sequence[torch.device], tensors: Sequence[Tensor], cap_bytes: int = 0) -> TorchCopies:
        asked.append([*devices])
        return TorchCopies("star")

    monkeypatch.setattr(comm, "transport_for", ask)
    root = slots[0]
    tensor, on_slots = torch.ones(6, device=root), [torch.ones(6, device=slot) for slot in slots]
    comm.broadcast(tensor, slots)
    comm.broadcast_coalesced([tensor, tensor], slots)
    comm.reduce_add(on_slots, root)
    comm.reduce_add_coalesced([[each] for each in on_slots], root)
    comm.scatter(tensor, slots)
    comm.gather(on_slots, 0, root)
    comm.gather(on_slots, 0, out=torch.empty(6 * len(slots), device=root))
    assert asked == [[torch.device(slot) for slot in slots]] * len(asked)
    comm.gather(on_slots, 0, "cpu")
    devices = [torch.device(slot) for slot in slots]
    assert asked[-1] == (devices if root == "cpu" else [torch.device("cpu"), *devices])
