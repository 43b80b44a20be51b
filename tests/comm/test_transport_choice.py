"""The choice of transport and route for a call, as a table over machines that need not exist."""

import itertools

import pytest
import torch

from dataparallel.comm.settings import ROUTES, TRANSPORTS, CommSettings
from dataparallel.comm.transport_choice import Choice, choose

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

CPU = torch.device("cpu")
OTHER = torch._C._get_privateuse1_backend_name()  # the simulated devices, where there are some
WORK = ["broadcast", "reduce_add", "gather", "scatter"]

ALL: dict[str, str | None] = dict.fromkeys(TRANSPORTS)
PLAIN = ALL | {"nccl": "this torch has no NCCL", "cupy": "CuPy is not installed"}

SMALL, LARGE = 2**10, 2**26


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def sim(*indices: int) -> list[torch.device]:
    return [torch.device(OTHER, index) for index in indices]


ONE = cuda(0)
ONE_TWICE = cuda(0, 0)
CPU_SLOTS = [CPU] * 3
CUDA_2 = cuda(0, 1)
CUDA_4 = cuda(*range(4))
CUDA_8 = cuda(*range(8))
CUDA_TWICE = cuda(0, 1, 2, 1)
SIM_2 = sim(0, 1)
SIM_8 = sim(*range(8))
SIM_PAIRS = sim(0, 0, 1, 1)
MIXED = [CPU, *cuda(0, 1)]
CPU_AND_SIM = [CPU, *sim(0, 1)]
MIXED_ONE = [CPU, *sim(0)]


def decide(
    work: str,
    where: list[torch.device],
    nbytes: int = LARGE,
    settings: CommSettings = CommSettings(),  # noqa: B008
    available: dict[str, str | None] = PLAIN,
    failed_pairs: object = frozenset(),
) -> Choice:
    return choose(work, where, nbytes, settings, available.get(settings.transport or ""), failed_pairs)


# devices, work, bytes -> route
TABLE = [
    # Nothing travels.
    (ONE, "broadcast", LARGE, "star"),
    (ONE_TWICE, "reduce_add", LARGE, "star"),
    (CPU_SLOTS, "broadcast", LARGE, "star"),
    (CPU_SLOTS, "reduce_add", LARGE, "star"),
    # The routes of plain copies.
    (CUDA_2, "broadcast", LARGE, "star"),
    (CUDA_2, "reduce_add", LARGE, "star"),
    (CUDA_4, "broadcast", 0, "star"),
    (CUDA_4, "broadcast", SMALL, "star"),
    (CUDA_4, "broadcast", 2**20, "chain"),
    (CUDA_4, "broadcast", LARGE, "chain"),
    (CUDA_4, "reduce_add", SMALL, "star"),
    (CUDA_4, "reduce_add", LARGE, "chain"),
    (CUDA_TWICE, "reduce_add", LARGE, "chain"),
    # Simulated devices: the same rules.
    (SIM_2, "broadcast", LARGE, "star"),
    (SIM_PAIRS, "broadcast", LARGE, "star"),
    (SIM_8, "broadcast", SMALL, "star"),
    (SIM_8, "broadcast", LARGE, "chain"),
    (SIM_8, "reduce_add", SMALL, "star"),
    (SIM_8, "reduce_add", LARGE, "chain"),
    # The CPU among the devices: copies from and to it block.
    (MIXED, "broadcast", LARGE, "star"),
    (MIXED, "reduce_add", LARGE, "star"),
    (MIXED_ONE, "broadcast", LARGE, "star"),
    # Every chunk has one way.
    *((where, work, LARGE, "star") for where in (CUDA_8, SIM_8, MIXED) for work in WORK[2:]),
]


@pytest.mark.parametrize("available", [ALL, PLAIN])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("where", "work", "nbytes", "route"), TABLE)
def test_by_default_plain_copies_take_a_route(
    where: list, work: str, nbytes: int, route: str, deterministic: bool, available: dict
) -> None:
    settings = CommSettings(deterministic=deterministic)
    assert decide(work, where, nbytes, settings, available)[:2] == ("copy", route)


# What a user asks for


@pytest.mark.parametrize(
    ("work", "asked", "route"),
    [
        *((work, route, route) for work in WORK[:2] for route in ROUTES),
        *itertools.product(["gather", "scatter"], ROUTES, ["star"]),
    ],
)
@pytest.mark.parametrize("where", [CUDA_8, CUDA_2, SIM_8, MIXED])
@pytest.mark.parametrize("transport", [None, "copy"])
def test_a_route_that_is_asked_for_is_taken_by_plain_copies(
    work: str, asked: str, route: str, where: list, transport: str | None
) -> None:
    for nbytes in (SMALL, LARGE):
        assert decide(work, where, nbytes, CommSettings(transport, asked), ALL)[:2] == ("copy", route)


@pytest.mark.parametrize(
    ("transport", "work", "where", "deterministic"),
    [
        *((transport, "broadcast", CUDA_8, True) for transport in TRANSPORTS),
        ("nccl", "broadcast", CUDA_TWICE, True),  # a buffer goes to each device once
        ("nccl", "reduce_add", CUDA_8, False),
        ("nccl", "reduce_scatter", CUDA_8, False),
        ("cupy", "reduce_add", CUDA_TWICE, True),
    ],
)
def test_a_transport_that_is_asked_for_is_used(transport: str, work: str, where: list, deterministic: bool) -> None:
    for nbytes in (SMALL, LARGE):
        choice = decide(work, where, nbytes, CommSettings(transport, deterministic=deterministic), ALL)
        assert choice.transport == transport
        assert "asked for" in choice.reason


ANY_ORDER = {"deterministic": False}
CPU_AND_ONE = [CPU, *cuda(0)]
TWO_KINDS = [*cuda(0, 1), *sim(0)]

# transport, work, machine, what else is asked for, words of the reason
FALL_BACK = [
    *(("nccl", work, where, {}, "has no") for work in WORK[2:] for where in (CUDA_8, MIXED, SIM_8)),
    *(("cupy", work, where, {}, "has no") for work in WORK[2:] for where in (CUDA_8, MIXED, SIM_8)),
    ("cupy", "reduce_scatter", CUDA_8, {}, "has no"),
    *(("nccl", "reduce_add", where, {}, "an order of its own") for where in (CUDA_8, CUDA_TWICE, MIXED, SIM_8)),
    *(("nccl", "reduce_scatter", where, {}, "an order of its own") for where in (CUDA_8, MIXED, SIM_8)),
    *((name, work, MIXED, ANY_ORDER, "cpu is none") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, CPU_AND_ONE, ANY_ORDER, "fewer than two") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, MIXED_ONE, ANY_ORDER, "fewer than two") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, TWO_KINDS, ANY_ORDER, f"{OTHER}:0 is none") for name in ("nccl", "cupy") for work in WORK[:2]),
    *(("nccl", work, CUDA_TWICE, ANY_ORDER, "more than once") for work in ("reduce_add", "reduce_scatter")),
]


def test_kernels_gather_and_scatter_what_is_small() -> None:
    asked = CommSettings("cupy")
    for work in ("gather", "scatter"):
        assert decide(work, CUDA_8, SMALL, asked, ALL)[:2] == ("cupy", "star")
        assert decide(work, CUDA_8, 2**20, asked, ALL)[:2] == ("copy", "star")


@pytest.mark.parametrize("available", [ALL, PLAIN])
@pytest.mark.parametrize(("transport", "work", "where", "also", "words"), FALL_BACK)
def test_a_call_that_a_transport_does_not_support_falls_back_to_plain_copies(
    transport: str, work: str, where: list, also: dict, words: str, available: dict
) -> None:
    for route in (None, *ROUTES):
        choice = decide(work, where, settings=CommSettings(transport, route, **also), available=available)
        assert choice[:2] == decide(work, where, settings=CommSettings("copy", route, **also), available=available)[:2]
    assert f"{transport!r} was asked for, but this {work} falls back to plain copies" in choice.reason
    assert words in choice.reason


@pytest.mark.parametrize("transport", ["nccl", "cupy"])
def test_a_call_that_falls_back_is_not_refused_for_a_broken_pair(transport: str) -> None:
    with_cpu = [CPU, *cuda(0, 1, 2)]
    for work, where in (("gather", CUDA_8), ("scatter", with_cpu), ("broadcast", with_cpu), ("reduce_add", with_cpu)):
        assert decide(work, where, settings=CommSettings(transport), failed_pairs={BROKEN}).transport == "host"


@pytest.mark.parametrize(
    ("transport", "where", "available", "words"),
    [
        ("nccl", CUDA_8, PLAIN, ["this torch has no NCCL"]),
        ("cupy", CUDA_8, PLAIN, ["CuPy is not installed"]),
        ("nccl", SIM_8, ALL, ["CUDA", f"{OTHER}:0"]),
        ("cupy", SIM_8, ALL, ["CUDA", f"{OTHER}:0"]),
        ("nccl", SIM_8, PLAIN, ["CUDA", f"{OTHER}:0"]),
        ("cupy", CPU_AND_SIM, ALL, ["CUDA", f"{OTHER}:0 is none"]),
    ],
)
def test_a_transport_that_cannot_is_refused_with_the_reason(
    transport: str, where: list, available: dict, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"'{transport}' was asked for") as caught:
        decide("broadcast", where, settings=CommSettings(transport), available=available)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("where", [ONE, ONE_TWICE, CPU_SLOTS])
def test_where_nothing_travels_no_transport_is_refused(transport: str, where: list) -> None:
    for work in WORK:
        assert decide(work, where, settings=CommSettings(transport), available={})[:2] == ("copy", "star")


# A broken pair

BROKEN = (torch.device("cuda", 2), torch.device("cuda", 1))


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    "settings", [CommSettings(), CommSettings("copy"), CommSettings("host"), CommSettings(route="chain")]
)
def test_a_call_with_a_broken_pair_goes_through_the_host(work: str, settings: CommSettings) -> None:
    choice = decide(work, CUDA_8, LARGE, settings, ALL, {BROKEN})
    assert choice[:2] == ("host", "star")
    if settings.transport != "host":
        assert "from cuda:2 to cuda:1" in choice.reason


def test_calls_without_the_broken_pair_are_as_ever() -> None:
    for where in (CUDA_2, cuda(0, 2, 3), SIM_8):
        as_ever = decide("broadcast", where, available=ALL)
        assert decide("broadcast", where, available=ALL, failed_pairs=[BROKEN]) == as_ever


@pytest.mark.parametrize("transport", ["nccl", "cupy"])
def test_a_transport_that_needs_the_broken_pair_is_refused(transport: str) -> None:
    with pytest.raises(ValueError, match="from cuda:2 to cuda:1") as caught:
        decide("broadcast", CUDA_8, settings=CommSettings(transport), available=ALL, failed_pairs=[BROKEN])
    assert "'host'" in str(caught.value)
    assert "DATAPARALLEL_PEER_CHECK" in str(caught.value)
