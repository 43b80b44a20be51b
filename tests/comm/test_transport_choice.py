"""What carries a call: plain copies, unless kernels were asked for and support it; copies that failed go by the host.

The choice is tried on CUDA devices of which only the names exist, and in whole steps on simulated ones.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, comm
from dataparallel.comm import kernels, peers, transport_choice
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.routes import Chain, Star
from dataparallel.comm.settings import TRANSPORT_VARIABLE, TRANSPORTS
from dataparallel.comm.transport_choice import transport_for

pytestmark = pytest.mark.usefixtures("forgetful")
pure = pytest.mark.devices("cpu")  # without slots one run is enough

CPU = torch.device("cpu")
WORK = ["broadcast", "reduce_add", "gather", "scatter", "reduce_scatter"]
SMALL, MIDDLE, LARGE = 2**10, 2**20, 2**26  # bytes
BROKEN = (torch.device("cuda", 2), torch.device("cuda", 1))


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


ONE_TWICE = cuda(0, 0)
CPU_SLOTS = [CPU] * 3
CUDA_2 = cuda(0, 1)
CUDA_4 = cuda(*range(4))
CUDA_8 = cuda(*range(8))
CUDA_TWICE = cuda(0, 1, 2, 1)
MIXED = [CPU, *cuda(0, 1)]
MIXED_BROKEN = [CPU, *cuda(0, 1, 2)]
CPU_AND_ONE = [CPU, *cuda(0)]


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list:
    """Pairs whose copies have failed their check, on a machine whose devices kernels serve."""
    pairs: list = []
    monkeypatch.setattr(transport_choice, "failed_pairs", lambda devices: [p for p in pairs if {*p} <= {*devices}])
    monkeypatch.setattr(kernels, "why_not", lambda devices: None)
    return pairs


def chosen(work: str, where: list, nbytes: int = LARGE, asked: str | None = None) -> type:
    with comm.using(transport=asked):
        return type(transport_for(work, where, [torch.empty(nbytes, dtype=torch.uint8, device="meta")]))


# devices, work, bytes, class
TABLE = [
    # Nothing travels.
    *((where, work, LARGE, Star) for where in (ONE_TWICE, CPU_SLOTS, cuda(0)) for work in WORK),
    # The routes of plain copies.
    *((CUDA_2, work, LARGE, Star) for work in WORK),
    *((where, work, SMALL, Star) for where in (CUDA_4, CUDA_8) for work in WORK),
    *((where, work, LARGE, Chain) for where in (CUDA_4, CUDA_8, CUDA_TWICE) for work in WORK[:2]),
    (CUDA_4, "broadcast", 0, Star),
    (CUDA_4, "broadcast", MIDDLE - 1, Star),
    (CUDA_4, "broadcast", MIDDLE, Chain),
    # The CPU among the devices: copies from and to it block.
    *((where, work, LARGE, Star) for where in (MIXED, CPU_AND_ONE) for work in WORK),
    # Every chunk has one way.
    *((where, work, LARGE, Star) for where in (CUDA_8, MIXED) for work in WORK[2:]),
]


@pure
@pytest.mark.parametrize("asked", [None, "copy"])
@pytest.mark.parametrize(("where", "work", "nbytes", "found"), TABLE)
def test_plain_copies_take_a_route(
    where: list, work: str, nbytes: int, found: type, asked: str | None, failed: list
) -> None:
    assert chosen(work, where, nbytes, asked) is found


@pure
@pytest.mark.parametrize("sizes", [[MIDDLE // 2, MIDDLE // 2], [MIDDLE]])
def test_what_travels_in_one_bucket_decides(sizes: list[int], failed: list) -> None:
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    assert type(transport_for("broadcast", CUDA_4, tensors)) is Chain
    # A tensor that is larger than a bucket is one of its own.
    assert type(transport_for("broadcast", CUDA_4, tensors, 2**10)) is (Chain if len(sizes) == 1 else Star)


@pure
@pytest.mark.parametrize(
    ("work", "where", "nbytes", "found"),
    [
        *((work, where, size, Cupy) for work in WORK[:2] for where in (CUDA_2, CUDA_TWICE) for size in (SMALL, LARGE)),
        *((work, CUDA_8, SMALL, Cupy) for work in WORK),
        *((work, CUDA_8, MIDDLE, Star) for work in WORK[2:]),
        *((work, where, size, Star) for work in WORK for where in (MIXED, CPU_AND_ONE) for size in (SMALL, LARGE)),
        *((work, where, SMALL, Star) for work in WORK for where in (ONE_TWICE, CPU_SLOTS)),
    ],
)
def test_kernels_that_are_asked_for_serve_what_they_support(
    work: str, where: list, nbytes: int, found: type, failed: list
) -> None:
    assert chosen(work, where, nbytes, "cupy") is found


@pure
def test_kernels_that_cannot_serve_are_refused_with_the_reason(failed: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda devices: "CuPy is not installed")
    for work in WORK[:2]:
        with pytest.raises(ValueError, match=r"'cupy' was asked for .* between cuda:0, cuda:1: CuPy is not installed"):
            chosen(work, CUDA_2, LARGE, "cupy")
    for where in (ONE_TWICE, CPU_SLOTS, MIXED):  # where they have no part, nothing is refused
        assert chosen("broadcast", where, LARGE, "cupy") is Star
    assert chosen("gather", CUDA_8, LARGE, "cupy") is Star


@pure
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("asked", [None, "copy", "host"])
def test_a_call_with_a_broken_pair_goes_through_the_host(work: str, asked: str | None, failed: list) -> None:
    failed.append(BROKEN)
    assert chosen(work, CUDA_8, LARGE, asked) is ThroughHost
    assert chosen(work, MIXED_BROKEN, LARGE, asked) is ThroughHost
    for where in (CUDA_2, cuda(0, 2, 3)):  # as ever
        assert (chosen(work, where, LARGE, asked) is ThroughHost) == (asked == "host")


@pure
def test_kernels_are_refused_where_a_pair_is_broken_and_what_falls_back_is_not(failed: list) -> None:
    failed.append(BROKEN)
    with pytest.raises(ValueError, match=r"from cuda:2 to cuda:1 have failed .* use 'host'") as caught:
        chosen("broadcast", CUDA_8, LARGE, "cupy")
    assert "DATAPARALLEL_PEER_CHECK=0" in str(caught.value)
    for work, where in (("gather", CUDA_8), *((work, MIXED_BROKEN) for work in WORK)):
        assert chosen(work, where, LARGE, "cupy") is ThroughHost


@pure
def test_without_checks_every_pair_is_trusted(failed: list, monkeypatch: pytest.MonkeyPatch) -> None:
    failed.append(BROKEN)
    monkeypatch.setenv("DATAPARALLEL_PEER_CHECK", "0")
    assert chosen("broadcast", CUDA_8) is Chain
    assert chosen("broadcast", CUDA_8, LARGE, "cupy") is Cupy


# ---- whole steps -----------------------------------------------------------------------------------------------------


def step(model: nn.Module, net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    y = model(x)
    y.abs().square().sum().backward()
    return [y.detach().cpu(), *(parameter.grad.cpu() for parameter in net.parameters())]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.devices("sim")
@pytest.mark.slots(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_environment_alone_trains(
    name: str, dtype: torch.dtype, slots: list, launches: Counter, monkeypatch: pytest.MonkeyPatch
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
    found = step(model, net, x)
    assert all(map(torch.equal, found, expected))
    assert {*launches} == ({"copy_many", "sum"} if name == "cupy" else set())


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
            transport = transport_for("broadcast", slots, [torch.empty(2**20)])
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
def test_a_whole_step_takes_the_transport_of_its_forward(slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums run in threads of the engine, which do not have the caller's context."""
    taken: list[tuple[type, bool]] = []

    def noted(*args: Any, choose: Callable = comm.transport_for) -> Any:
        transport = choose(*args)
        if args[0] == "reduce_add":
            taken.append((type(transport), threading.current_thread() is threading.main_thread()))
        return transport

    monkeypatch.setattr(comm, "transport_for", noted)
    model = DataParallel(nn.Linear(4, 3).to(slots[0]), slots)
    x = torch.randn(6, 4, device=slots[0])
    with comm.using(transport="host"):
        loss = model(x).square().sum()
    loss.backward()
    assert {*taken} == {(ThroughHost, False)}
