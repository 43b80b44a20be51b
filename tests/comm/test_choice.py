"""The choice of transport and route for a call, as a table over machines that need not exist."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.comm import topology
from dataparallel.comm.choice import CHAIN_FROM_BYTES, CUPY_FROM_TENSORS, NCCL_FROM_BYTES, Choice, choose
from dataparallel.comm.settings import ROUTES, TRANSPORTS, Settings
from dataparallel.comm.topology import Link, Topology

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

CPU = torch.device("cpu")
OTHER = torch._C._get_privateuse1_backend_name()  # the simulated devices, where there are some
WORK = ["broadcast", "reduce_add", "gather", "scatter"]

ALL: dict[str, str | None] = dict.fromkeys(TRANSPORTS)
PLAIN = ALL | {"nccl": "this torch has no NCCL", "cupy": "CuPy is not installed"}
NO_CUPY = ALL | {"cupy": "CuPy is not installed"}

SMALL, LARGE, HUGE = CHAIN_FROM_BYTES - 1, CHAIN_FROM_BYTES, NCCL_FROM_BYTES
FEW, MANY = CUPY_FROM_TENSORS - 1, CUPY_FROM_TENSORS


def cuda(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def sim(*indices: int) -> list[torch.device]:
    return [torch.device(OTHER, index) for index in indices]


def machine(
    devices: list[torch.device], link: Link, slower: tuple[int, int] | None = None, by: Link = Link.HOST
) -> Topology:
    """All devices linked alike, but for one pair; a device with itself and the CPU as they always are."""
    links = {}
    for one, other in itertools.permutations(range(len(devices)), 2):
        types = {devices[one].type, devices[other].type}
        if devices[one] == devices[other]:
            links[one, other] = Link.SAME
        elif len(types) > 1:
            links[one, other] = Link.HOST
        else:
            links[one, other] = by if slower is not None and {one, other} == {*slower} else link
    return Topology(tuple(devices), links)


ONE = machine(cuda(0), Link.NVLINK)
ONE_TWICE = machine(cuda(0, 0), Link.NVLINK)
CPU_SLOTS = topology.of([CPU] * 3)
NVLINK_2 = machine(cuda(0, 1), Link.NVLINK)
NVLINK_8 = machine(cuda(*range(8)), Link.NVLINK)
NVLINK_TWICE = machine(cuda(0, 1, 2, 1), Link.NVLINK)
PCIE_2 = machine(cuda(0, 1), Link.PEER)
PCIE_4 = machine(cuda(*range(4)), Link.PEER)
ONE_BY_PCIE = machine(cuda(*range(4)), Link.NVLINK, (1, 3), by=Link.PEER)
NO_PEERS = machine(cuda(*range(4)), Link.HOST)
ONE_WITHOUT = machine(cuda(*range(4)), Link.NVLINK, (1, 3))
SIM_2 = machine(sim(0, 1), Link.PEER)
SIM_8 = machine(sim(*range(8)), Link.PEER)
SIM_PAIRS = machine(sim(0, 0, 1, 1), Link.PEER)
MIXED = machine([CPU, *cuda(0, 1)], Link.NVLINK)
CPU_AND_SIM = machine([CPU, *sim(0, 1)], Link.PEER)
MIXED_ONE = machine([CPU, *sim(0)], Link.PEER)


def decide(
    work: str,
    where: Topology,
    nbytes: int = LARGE,
    count: int = MANY,
    settings: Settings = Settings(),  # noqa: B008
    available: dict[str, str | None] = PLAIN,
    untrusted: object = frozenset(),
) -> Choice:
    return choose(work, where, nbytes, count, settings, available, untrusted)


# machine, work, bytes, tensors, what is available -> transport, route
TABLE = [
    # Nothing travels.
    (ONE, "broadcast", HUGE, MANY, ALL, "copy", "star"),
    (ONE_TWICE, "reduce_add", HUGE, MANY, ALL, "copy", "star"),
    (CPU_SLOTS, "broadcast", HUGE, MANY, ALL, "copy", "star"),
    (CPU_SLOTS, "reduce_add", HUGE, MANY, ALL, "copy", "star"),
    # Kernels for many tensors, wherever devices reach each other.
    (NVLINK_2, "broadcast", SMALL, MANY, ALL, "cupy", "star"),
    (NVLINK_8, "broadcast", HUGE, MANY, ALL, "cupy", "star"),
    (NVLINK_8, "reduce_add", SMALL, MANY, ALL, "cupy", "star"),
    (NVLINK_TWICE, "reduce_add", HUGE, MANY, ALL, "cupy", "star"),
    (PCIE_4, "broadcast", LARGE, MANY, ALL, "cupy", "star"),
    (PCIE_4, "reduce_add", LARGE, MANY, ALL, "cupy", "star"),
    (ONE_BY_PCIE, "broadcast", HUGE, MANY, ALL, "cupy", "star"),
    # Few tensors: NCCL for large broadcasts over NVLink.
    (NVLINK_8, "broadcast", HUGE, FEW, ALL, "nccl", "star"),
    (NVLINK_8, "broadcast", HUGE, MANY, NO_CUPY, "nccl", "star"),
    (NVLINK_8, "broadcast", HUGE - 1, FEW, ALL, "copy", "chain"),
    (NVLINK_8, "broadcast", HUGE, FEW, PLAIN, "copy", "chain"),
    (NVLINK_8, "reduce_add", HUGE, FEW, ALL, "copy", "chain"),
    (NVLINK_2, "broadcast", HUGE, FEW, ALL, "copy", "star"),
    (NVLINK_TWICE, "broadcast", HUGE, FEW, ALL, "nccl", "star"),
    (ONE_BY_PCIE, "broadcast", HUGE, FEW, ALL, "copy", "chain"),
    (PCIE_4, "broadcast", HUGE, FEW, ALL, "copy", "chain"),
    # Peers that cannot reach each other: torch's copies find their way.
    (NO_PEERS, "broadcast", HUGE, MANY, ALL, "copy", "chain"),
    (NO_PEERS, "reduce_add", SMALL, MANY, ALL, "copy", "star"),
    (ONE_WITHOUT, "broadcast", HUGE, MANY, ALL, "copy", "chain"),
    (ONE_WITHOUT, "reduce_add", HUGE, MANY, ALL, "copy", "chain"),
    # The routes of plain copies.
    (PCIE_2, "broadcast", HUGE, FEW, PLAIN, "copy", "star"),
    (PCIE_2, "reduce_add", HUGE, FEW, PLAIN, "copy", "star"),
    (PCIE_4, "broadcast", 0, FEW, PLAIN, "copy", "tree"),
    (PCIE_4, "broadcast", SMALL, FEW, PLAIN, "copy", "tree"),
    (PCIE_4, "broadcast", LARGE, FEW, PLAIN, "copy", "chain"),
    (PCIE_4, "reduce_add", SMALL, FEW, PLAIN, "copy", "star"),
    (PCIE_4, "reduce_add", LARGE, FEW, PLAIN, "copy", "chain"),
    # Simulated devices: the same rules.
    (SIM_2, "broadcast", HUGE, MANY, ALL, "copy", "star"),
    (SIM_PAIRS, "broadcast", HUGE, MANY, ALL, "copy", "star"),
    (SIM_8, "broadcast", SMALL, MANY, ALL, "copy", "tree"),
    (SIM_8, "broadcast", LARGE, MANY, ALL, "copy", "chain"),
    (SIM_8, "reduce_add", SMALL, MANY, ALL, "copy", "star"),
    (SIM_8, "reduce_add", LARGE, MANY, ALL, "copy", "chain"),
    # The CPU among the devices: copies from and to it block.
    (MIXED, "broadcast", HUGE, MANY, ALL, "copy", "star"),
    (MIXED, "reduce_add", HUGE, MANY, ALL, "copy", "star"),
    (MIXED_ONE, "broadcast", HUGE, MANY, ALL, "copy", "star"),
    # Every chunk has one way.
    *((where, work, HUGE, MANY, ALL, "copy", "star") for where in (NVLINK_8, SIM_8, MIXED) for work in WORK[2:]),
]


@pytest.mark.parametrize(("where", "work", "nbytes", "count", "available", "transport", "route"), TABLE)
def test_by_default(
    where: Topology, work: str, nbytes: int, count: int, available: dict, transport: str, route: str
) -> None:
    assert decide(work, where, nbytes, count, available=available)[:2] == (transport, route)


# What a user asks for


@pytest.mark.parametrize(
    ("work", "asked", "route"),
    [
        ("broadcast", "star", "star"),
        ("broadcast", "tree", "tree"),
        ("broadcast", "chain", "chain"),
        ("reduce_add", "star", "star"),
        ("reduce_add", "tree", "star"),
        ("reduce_add", "chain", "chain"),
        *itertools.product(["gather", "scatter"], ROUTES, ["star"]),
    ],
)
@pytest.mark.parametrize("where", [NVLINK_8, PCIE_2, SIM_8, NO_PEERS, MIXED])
@pytest.mark.parametrize("transport", [None, "copy"])
def test_a_route_that_is_asked_for_is_taken_by_plain_copies(
    work: str, asked: str, route: str, where: Topology, transport: str | None
) -> None:
    for nbytes in (SMALL, HUGE):
        assert decide(work, where, nbytes, MANY, Settings(transport, asked), ALL)[:2] == ("copy", route)


@pytest.mark.parametrize("transport", ["nccl", "cupy", "host", "copy"])
def test_a_transport_that_is_asked_for_is_used(transport: str) -> None:
    for nbytes, count in itertools.product([SMALL, HUGE], [FEW, MANY]):
        choice = decide("broadcast", NVLINK_8, nbytes, count, Settings(transport), ALL)
        assert choice.transport == transport
        assert "asked for" in choice.reason


def test_nccl_adds_only_where_the_order_does_not_matter() -> None:
    settings = Settings("nccl", deterministic=False)
    assert decide("reduce_add", NVLINK_8, settings=settings, available=ALL).transport == "nccl"
    in_order = decide("reduce_add", NVLINK_8, settings=Settings("nccl"), available=ALL)
    assert in_order[:2] == ("copy", "chain")
    assert "deterministic=False" in in_order.reason


def test_nobody_adds_in_another_order_unasked() -> None:
    assert decide("reduce_add", NVLINK_8, HUGE, FEW, Settings(deterministic=False), ALL).transport == "copy"


ANY_ORDER = {"deterministic": False}
ISOLATED = {"isolated": True, "deterministic": False}
CPU_AND_ONE = machine([CPU, *cuda(0)], Link.NVLINK)
TWO_KINDS = machine([*cuda(0, 1), *sim(0)], Link.NVLINK)

# transport, work, machine, what else is asked for, words of the reason
FALL_BACK = [
    *(("nccl", work, where, {}, "has no") for work in WORK[2:] for where in (NVLINK_8, MIXED, SIM_8, NO_PEERS)),
    *(("cupy", work, where, {}, "has no") for work in WORK[2:] for where in (NVLINK_8, MIXED, SIM_8, NO_PEERS)),
    *(("nccl", "reduce_add", where, {}, "an order of its own") for where in (NVLINK_8, NVLINK_TWICE, MIXED, SIM_8)),
    *((name, work, MIXED, ANY_ORDER, "cpu is none") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, CPU_AND_ONE, ANY_ORDER, "fewer than two") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, MIXED_ONE, ANY_ORDER, "fewer than two") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, TWO_KINDS, ANY_ORDER, f"{OTHER}:0 is none") for name in ("nccl", "cupy") for work in WORK[:2]),
    *((name, work, CPU_SLOTS, ISOLATED, "fewer than two") for name in ("nccl", "cupy") for work in WORK[:2]),
    *(("nccl", work, ONE_TWICE, ISOLATED, "cuda:0 is listed more than once") for work in WORK[:2]),
    *(("nccl", work, NVLINK_TWICE, ISOLATED, "cuda:1 is listed more than once") for work in WORK[:2]),
    ("nccl", "reduce_add", NVLINK_TWICE, ANY_ORDER, "cuda:1 is listed more than once"),
]


@pytest.mark.parametrize("available", [ALL, PLAIN])
@pytest.mark.parametrize(("transport", "work", "where", "also", "words"), FALL_BACK)
def test_a_call_that_a_transport_does_not_support_falls_back_to_plain_copies(
    transport: str, work: str, where: Topology, also: dict, words: str, available: dict
) -> None:
    choice = decide(work, where, settings=Settings(transport, **also), available=available)
    assert choice[:2] == decide(work, where, settings=Settings("copy", **also), available=available)[:2]
    assert f"{transport!r} was asked for, but this {work} falls back to plain copies" in choice.reason
    assert words in choice.reason


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_that_falls_back_takes_the_route_that_is_asked_for(route: str) -> None:
    assert decide("broadcast", MIXED, settings=Settings("nccl", route), available=ALL)[:2] == ("copy", route)


def test_nccl_broadcasts_to_slots_that_share_a_device() -> None:
    """A buffer goes to each device once."""
    assert decide("broadcast", NVLINK_TWICE, settings=Settings("nccl"), available=ALL).transport == "nccl"


@pytest.mark.parametrize("work", WORK[:2])
def test_kernels_serve_isolated_slots_on_one_device(work: str) -> None:
    settings = Settings("cupy", isolated=True)
    for where in (ONE_TWICE, NVLINK_TWICE):
        assert decide(work, where, settings=settings, available=ALL).transport == "cupy"


@pytest.mark.parametrize("transport", ["nccl", "cupy"])
def test_a_call_that_falls_back_is_not_refused_for_a_broken_pair(transport: str) -> None:
    with_cpu = machine([CPU, *cuda(0, 1, 2)], Link.NVLINK)
    for work, where in (("gather", NVLINK_8), ("scatter", with_cpu), ("broadcast", with_cpu), ("reduce_add", with_cpu)):
        assert decide(work, where, settings=Settings(transport), untrusted={BROKEN}).transport == "host"


@pytest.mark.parametrize(
    ("transport", "where", "available", "words"),
    [
        ("nccl", NVLINK_8, PLAIN, ["this torch has no NCCL"]),
        ("cupy", NVLINK_8, PLAIN, ["CuPy is not installed"]),
        ("cupy", NVLINK_8, {}, ["not built in"]),
        ("host", NVLINK_8, PLAIN | {"host": "no memory is left"}, ["no memory is left"]),
        ("nccl", SIM_8, ALL, ["CUDA", f"{OTHER}:0"]),
        ("cupy", SIM_8, ALL, ["CUDA", f"{OTHER}:0"]),
        ("nccl", SIM_8, PLAIN, ["CUDA", f"{OTHER}:0"]),
        ("cupy", CPU_AND_SIM, ALL, ["CUDA", f"{OTHER}:0 is none"]),
        ("cupy", NO_PEERS, ALL, ["peer access", "cuda:0 and cuda:1"]),
        ("cupy", ONE_WITHOUT, ALL, ["peer access", "cuda:1 and cuda:3"]),
    ],
)
def test_a_transport_that_cannot_is_refused_with_the_reason(
    transport: str, where: Topology, available: dict, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"'{transport}' was asked for") as caught:
        decide("broadcast", where, settings=Settings(transport), available=available)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("where", [ONE, ONE_TWICE, CPU_SLOTS])
def test_where_nothing_travels_no_transport_is_refused(transport: str, where: Topology) -> None:
    for work in WORK:
        assert decide(work, where, settings=Settings(transport), available={})[:2] == ("copy", "star")


# A broken pair

BROKEN = (torch.device("cuda", 2), torch.device("cuda", 1))


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("settings", [Settings(), Settings("copy"), Settings("host"), Settings(route="chain")])
def test_a_call_with_a_broken_pair_goes_through_the_host(work: str, settings: Settings) -> None:
    choice = decide(work, NVLINK_8, HUGE, MANY, settings, ALL, {BROKEN})
    assert choice[:2] == ("host", "star")
    if settings.transport != "host":
        assert "from cuda:2 to cuda:1" in choice.reason


def test_calls_without_the_broken_pair_are_as_ever() -> None:
    for where in (NVLINK_2, machine(cuda(0, 2, 3), Link.NVLINK), SIM_8):
        as_ever = decide("broadcast", where, available=ALL)
        assert decide("broadcast", where, available=ALL, untrusted=[BROKEN]) == as_ever


@pytest.mark.parametrize("transport", ["nccl", "cupy"])
def test_a_transport_that_needs_the_broken_pair_is_refused(transport: str) -> None:
    with pytest.raises(ValueError, match="from cuda:2 to cuda:1") as caught:
        decide("broadcast", NVLINK_8, settings=Settings(transport), available=ALL, untrusted=[BROKEN])
    assert "'host'" in str(caught.value)
    assert "DATAPARALLEL_PEER_CHECK" in str(caught.value)


# Whatever is asked, wherever

DEVICES = st.sampled_from([cuda(0, 1, 2, 3), sim(0, 1, 2, 3), [CPU, *cuda(0, 1)], [CPU]])
SETTINGS = st.builds(
    Settings, st.sampled_from([None, *TRANSPORTS]), st.sampled_from([None, *ROUTES]), st.booleans(), st.booleans()
)
AVAILABLE = st.fixed_dictionaries({name: st.sampled_from([None, "it is not here"]) for name in ("nccl", "cupy")})


@st.composite
def machines(draw: Callable) -> Topology:
    kinds = draw(DEVICES)
    devices = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    link = draw(st.sampled_from([Link.NVLINK, Link.PEER, Link.HOST]))
    pair = draw(st.sampled_from([None, (0, 1), (1, 2)]))
    return machine(devices, link, pair)


@given(st.sampled_from(WORK), machines(), st.integers(0, 2**24), st.integers(0, 9), SETTINGS, AVAILABLE, st.data())
def test_a_choice_can_always_be_carried_out(
    work: str, where: Topology, nbytes: int, count: int, settings: Settings, available: dict, data: st.DataObject
) -> None:
    pairs = list(itertools.permutations([d for d in where.distinct if d.type != "cpu"], 2))
    untrusted = data.draw(st.sets(st.sampled_from(pairs), max_size=1)) if pairs else set()
    try:
        choice = choose(work, where, nbytes, count, settings, available | {"host": None}, untrusted)
    except ValueError:
        assert settings.transport in ("nccl", "cupy"), "only what is asked for is refused"
        assert work in ("broadcast", "reduce_add")
        assert len([device for device in where.devices if device.type != "cpu"]) > 1
        kinds = {device.type for device in where.devices}
        assert "cpu" not in kinds or "cuda" not in kinds, "what ends on the CPU goes by plain copies"
        unreachable = settings.transport == "cupy" and Link.HOST in where.links.values()
        assert "cuda" not in kinds or available[settings.transport] is not None or untrusted or unreachable
        return
    assert choice.reason
    if len(where.distinct) < 2 and not (settings.isolated and len(where.devices) > 1):
        assert choice[:2] == ("copy", "star")
        return
    if untrusted:
        assert choice.transport == "host"
    if choice.transport in ("nccl", "cupy"):
        assert available[choice.transport] is None
        assert {device.type for device in where.devices} == {"cuda"}
    if choice.transport == "nccl":
        assert work == "broadcast" or settings.transport == "nccl"
        once = len(set(where.devices)) == len(where.devices)
        assert once or (work == "broadcast" and not settings.isolated)
        assert work != "reduce_add" or not settings.deterministic
    if choice.transport == "cupy":
        assert Link.HOST not in where.links.values()
        assert work in ("broadcast", "reduce_add")
    if choice.route != "star":
        assert choice.transport == "copy"
        assert work == "broadcast" or (work, choice.route) == ("reduce_add", "chain")
