"""Every route gives the same bits. Routes differ in the senders, the bytes they send, and the number of launches."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_kinds import devices_of, of_many_magnitudes
from torch import Tensor

from clocked import counted
from dataparallel.comm.routes import STAR, Chain, _number_of_pieces

MANY = 1000  # tensors


# Values


SIZES = st.one_of(st.integers(0, 2000), st.sampled_from([127, 128, 129, 1024, 1025]))
ALL_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.uint8]


def data_of(dtype: torch.dtype, size: int) -> Tensor:
    return of_many_magnitudes(size).clamp(-200, 200).abs().to(dtype)


@given(
    work=st.sampled_from(["broadcast", "sum"]),
    pieces=st.integers(0, 9),
    size=SIZES,
    dtype=st.sampled_from(ALL_DTYPES),
    places=st.lists(st.integers(0, 7), min_size=2, max_size=8),
    destination=st.integers(0, 7),
)
def test_every_route_has_the_bits_of_a_star(
    work: str,
    pieces: int,
    size: int,
    dtype: torch.dtype,
    places: list[int],
    destination: int,
    make_slots: Callable[[int], list],
) -> None:
    """Devices that are listed twice, in any order, and destinations in the middle or that are no slot included."""
    everyone = devices_of(make_slots(8))
    slots, target = [everyone[place] for place in places], everyone[destination]
    transport = Chain(pieces) if pieces else STAR
    if work == "sum":
        terms = [data_of(dtype, size) for _ in slots]
        expected = STAR.add_up([term.clone() for term in terms], torch.device("cpu"))
        total = transport.add_up([term.to(slot, copy=True) for term, slot in zip(terms, slots, strict=True)], target)
        assert (total.device, total.dtype, total.shape) == (target, dtype, expected.shape)
        assert torch.equal(total.cpu(), expected)
    else:
        data = data_of(dtype, size)
        buffers = [torch.empty_like(data, device=slot) for slot in slots]
        transport.broadcast_flat(data.to(target, copy=True), buffers)
        assert all(torch.equal(buffer.cpu(), data) for buffer in buffers)


# Traffic


@pytest.fixture
def bucket(slots: list) -> list[list[Tensor]]:
    """Many tensors on every slot, each of which has a device of its own."""
    if len({*slots}) < len(slots):
        pytest.skip("slots share devices")
    return [[torch.full((17,), float(k), device=slot) for k in range(MANY)] for slot in slots]


BYTES = MANY * 17 * 4
MARGIN = 8 * 128 * 4  # pieces begin at multiples of 128 elements, so they differ in size


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.slots(8)
@pytest.mark.parametrize("name", ["star", "chain"])
def test_traffic_of_a_broadcast_and_of_a_sum(name: str, slots: list, bucket: list[list[Tensor]]) -> None:
    route, most = (STAR, 7 * BYTES) if name == "star" else (Chain(3), BYTES)
    with counted() as counts:
        route.broadcast_coalesced(bucket[0], slots, 2**30, own=False)
    assert sum(counts.launches) == 1 + {"star": 7, "chain": 3 * 7}[name]
    assert abs(max(counts.sent(slot.index) for slot in slots) - most) <= MARGIN
    assert all(counts.received(slot.index) == BYTES for slot in slots[1:])
    with counted() as counts:
        route.reduce_add_coalesced(bucket, slots[0], 2**30)
    assert sum(counts.launches) == 8 + {"star": 7 + 7, "chain": 3 * (8 + 7)}[name]
    assert abs(max(counts.received(slot.index) for slot in slots) - most) <= MARGIN


@pytest.mark.parametrize(
    ("mebibytes", "pieces"), [(1, 1), (11, 1), (12, 2), (26, 2), (27, 3), (48, 4), (96, 8), (192, 16), (1000, 16)]
)
def test_a_chain_has_more_pieces_the_larger_a_buffer_is(mebibytes: int, pieces: int) -> None:
    """Half of a buffer of 12 MiB is on its way to the next device while the other half arrives."""
    assert _number_of_pieces(torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="meta")) == pieces


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.counts_memory
@pytest.mark.slots(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_a_sum(dtype: torch.dtype, slots: list) -> None:
    """At most one buffer more on each device, in the dtype of the sum, and none that outlives the call."""
    if len({*slots}) < len(slots):
        pytest.skip("slots share devices")
    size = 2**16
    flats = [torch.ones(size, dtype=dtype, device=slot) for slot in slots]
    before = [torch.accelerator.memory_allocated(slot) for slot in slots]
    for slot in slots:
        torch.accelerator.reset_peak_memory_stats(slot)
    total = Chain(4).add_up(flats, torch.device(slots[0]))
    assert total.data_ptr() == flats[0].data_ptr(), "the sum needs memory of its own"
    for slot, held in zip(slots, before, strict=True):
        assert torch.accelerator.max_memory_allocated(slot) - held <= 4 * size
        assert torch.accelerator.memory_allocated(slot) == held
