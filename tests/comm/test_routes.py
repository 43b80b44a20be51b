"""Every route gives the same bits. Routes differ in the senders, the bytes they send, and the number of launches."""

import operator
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensor_kinds import devices_of, of_many_magnitudes
from torch import Tensor

from dataparallel.comm import routes
from dataparallel.comm.routes import TorchCopies, hops
from dataparallel.comm.settings import ROUTES

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

MANY = 1000  # tensors


def devices(count: int) -> list[torch.device]:
    return [torch.device("meta", index) for index in range(count)]


# Ways


@given(st.sampled_from(ROUTES), st.integers(1, 40))
def test_all_devices_are_reached_once_and_none_sends_before_it_has_received(route: str, count: int) -> None:
    everyone = devices(count)
    have = {everyone[0]}
    for sender, receiver in hops(route, everyone):
        assert sender in have
        assert receiver not in have
        have.add(receiver)
    assert have == {*everyone}


@given(st.integers(2, 40))
def test_how_often_a_device_sends(count: int) -> None:
    def most(route: str) -> int:
        senders = [sender for sender, _ in hops(route, devices(count))]
        return max(map(senders.count, senders))

    assert most("star") == count - 1
    assert most("tree") <= 2
    assert most("chain") == 1


def test_a_tree_is_not_deep() -> None:
    depth = {device: 0 for device in devices(1)}
    for sender, receiver in hops("tree", devices(32)):
        depth[receiver] = depth[sender] + 1
    assert max(depth.values()) == 5


@given(st.integers(0, 12), st.integers(1, 5))
def test_pieces_follow_each_other_along_a_chain(count: int, pieces: int) -> None:
    order = routes.wavefront(count, pieces)
    assert sorted(order) == [(hop, piece) for hop in range(count) for piece in range(pieces)]
    place = {pair: at for at, pair in enumerate(order)}
    for hop, piece in order:
        if hop:  # the piece has arrived
            assert place[hop - 1, piece] < place[hop, piece]
        if hop and piece + 1 < pieces:  # and is sent on before the next but one arrives
            assert place[hop, piece] <= place[hop - 1, piece + 1] + count


# Values


@pytest.mark.slots(8)
@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("route", ROUTES)
def test_buffers_are_filled(route: str, size: int, slots: list, root: torch.device) -> None:
    source = torch.randn(size, device=root)
    buffers = {slot: torch.empty(size, device=slot) for slot in map(torch.device, slots) if slot != root}
    TorchCopies(route).broadcast_flat(source, [*buffers.values()])
    assert all(torch.equal(buffer.to(root), source) for buffer in buffers.values())


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("size", [1, 127, 129, 1000])
def test_sums_are_in_slot_order_to_the_bit(size: int, slots: list) -> None:
    slots = devices_of(slots)
    terms = [of_many_magnitudes(size).to(slot) for slot in slots]
    expected = reduce(operator.add, [term.cpu() for term in terms])
    for destination in (slots[0], slots[-1]):
        for route in ROUTES:
            total = TorchCopies(route).add_up([term.clone() for term in terms], destination)
            assert total.device == destination
            assert torch.equal(total.cpu(), expected)


@pytest.mark.slots(8)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("own", [False, True])
def test_coalesced_broadcasts_along_every_route(own: bool, route: str, slots: list, root: torch.device) -> None:
    everyone = [*devices_of(slots), root, torch.device(slots[-1])]
    tensors = [torch.randn(3, 5), torch.arange(7), torch.randn(4, 3).t(), torch.randn(400), torch.eye(3).to_sparse()]
    tensors = [tensor.to(root) for tensor in tensors]
    results = TorchCopies(route).broadcast_coalesced(tensors, everyone, 2**20, own=own)
    for device, on_slot in zip(everyone, results, strict=True):
        for copy, tensor in zip(on_slot, tensors, strict=True):
            assert copy.device == device
            assert copy.stride() == tensor.stride() if not tensor.is_sparse else copy.is_sparse
            assert torch.equal(copy.to_dense().to(root), tensor.to_dense())
    if own:
        addresses = [on_slot[0].untyped_storage().data_ptr() for on_slot in results]
        assert len({*addresses}) == len(everyone)


@pytest.mark.slots(8)
@pytest.mark.parametrize("route", ROUTES)
def test_coalesced_sums_along_every_route(route: str, slots: list, root: torch.device) -> None:
    shapes = [(3, 5), (1,), (0,), (300,), (4, 4)]
    inputs = [[of_many_magnitudes(*shape).to(slot) for shape in shapes] for slot in slots]
    before = [[tensor.clone() for tensor in on_slot] for on_slot in inputs]
    totals = TorchCopies(route).reduce_add_coalesced(inputs, root, 2**20)
    for total, *terms in zip(totals, *inputs, strict=True):
        assert torch.equal(total.cpu(), reduce(operator.add, [term.cpu() for term in terms]))
    for on_slot, old in zip(inputs, before, strict=True):
        assert all(map(torch.equal, on_slot, old)), "a sum changed its terms"


# Traffic


@pytest.fixture
def bucket(slots: list) -> list[list[Tensor]]:
    """Many tensors on every slot."""
    return [[torch.full((17,), float(k), device=slot) for k in range(MANY)] for slot in slots]


BYTES = MANY * 17 * 4


@pytest.mark.not_isolated("distinct devices")
@pytest.mark.devices("sim")
@pytest.mark.slots(8)
@pytest.mark.parametrize("route", ROUTES)
def test_traffic_of_a_broadcast(route: str, slots: list, bucket: list[list[Tensor]]) -> None:
    with torch.sim.counted() as counts:
        TorchCopies(route).broadcast_coalesced(bucket[0], slots, 2**30, own=False)
    assert sum(counts.launches) <= 3 * len(slots)
    most = max(counts.sent(slot.index) for slot in slots)
    assert most == {"star": 7, "tree": 2, "chain": 1}[route] * BYTES
    assert all(counts.received(slot.index) == BYTES for slot in slots[1:])


@pytest.mark.not_isolated("distinct devices")
@pytest.mark.devices("sim")
@pytest.mark.slots(8)
@pytest.mark.parametrize("route", ["star", "chain"])
def test_traffic_of_a_sum(route: str, slots: list, bucket: list[list[Tensor]]) -> None:
    with torch.sim.counted() as counts:
        TorchCopies(route).reduce_add_coalesced(bucket, slots[0], 2**30)
    assert sum(counts.launches) <= {"star": 3, "chain": 6}[route] * len(slots)
    most = max(counts.received(slot.index) for slot in slots)
    assert most == {"star": 7, "chain": 1}[route] * BYTES
