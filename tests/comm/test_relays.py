"""Where only a part of the pairs are peers, a copy between two others goes through a third device that both reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clocked import check_clocks, timeline
from dataparallel import DataParallel, comm
from dataparallel.comm import relays, transport_choice
from dataparallel.comm.relays import RelayedCopies, plan_relays
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.streams import held
from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.comm.transport_choice import transport_for
from dataparallel.composable import fully_shard, replicate
from nogpu.pytest import settle
from nogpu.timeline.presets import V100_LINKS

HYBRID_CUBE_MESH = {ends for pair in V100_LINKS for ends in (pair, pair[::-1])}

# ---- which relay -----------------------------------------------------------------------------------------------------

pure = pytest.mark.devices("cpu")
pairs = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)))


@pure
@given(count=st.integers(0, 8), access=pairs)
def test_each_pair_without_access_has_a_relay_if_a_third_device_reaches_both(count: int, access: set) -> None:
    def are_peers(*pair: int) -> bool:
        return pair in access and pair[::-1] in access

    found = plan_relays(range(count), lambda *pair: pair in access)
    for pair in permutations(range(count), 2):
        options = {each for each in range(count) if are_peers(pair[0], each) and are_peers(each, pair[1])}
        assert (pair in found) == (not are_peers(*pair) and bool(options))
        assert pair not in found or found[pair] in options


@pure
@given(st.permutations(range(8)))
def test_in_a_hybrid_cube_mesh_no_relay_and_no_link_carries_more_than_another(places: list[int]) -> None:
    """In whatever order the slots are. Each of four links between two halves carries a quarter."""
    found = plan_relays(places, lambda *pair: pair in HYBRID_CUBE_MESH)
    assert len(found) == 8 * 3
    assert {*Counter(found.values()).values()} == {3}
    assert len({(relay, target) for (_, target), relay in found.items()}) == 8  # each relay has one target
    hops = Counter(hop for (source, target), relay in found.items() for hop in ((source, relay), (relay, target)))
    assert {hops[hop] for hop in HYBRID_CUBE_MESH if hop[0] // 4 == hop[1] // 4} == {1}
    assert {hops[hop] for hop in HYBRID_CUBE_MESH if hop[0] // 4 != hop[1] // 4} == {3}


# ---- on devices ------------------------------------------------------------------------------------------------------

on_devices = pytest.mark.devices("sim", "stand-in")


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Callable[[set[tuple[int, int]]], None]:
    """Gives only these pairs of devices access to each other, and has copies of any size take relays."""

    def give(found: set[tuple[int, int]]) -> None:
        monkeypatch.setattr(
            torch.get_device_module(), "can_device_access_peer", lambda a, b: (a.index, b.index) in found
        )

    monkeypatch.setattr(relays, "_LEAST_BYTES", 1)
    return give


@pytest.fixture
def ring(access: Callable, slots: list, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Four devices, each of which has access to two others."""
    devices = [torch.device(slot) for slot in slots]
    if len({*devices}) < 4:
        pytest.skip("slots share devices")
    indices = [device.index for device in devices]
    neighbours = {*zip(indices, indices[1:] + indices[:1], strict=True)}
    access(neighbours | {pair[::-1] for pair in neighbours})
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "copy")
    return devices


@on_devices
@pytest.mark.slots(4)
@pytest.mark.apart(4)
def test_only_where_a_part_of_the_pairs_are_peers(access: Callable, slots: list) -> None:
    devices, large = [torch.device(slot) for slot in slots], [torch.empty(2**20)]
    everyone = {*permutations([device.index for device in devices], 2)}
    for found in (everyone, set()):
        transport_choice.forget()
        access(found)
        assert type(transport_for("broadcast", devices, large)) is TorchCopies
    transport_choice.forget()
    access(everyone - {(devices[0].index, devices[2].index)})
    for work in ("broadcast", "reduce_add", "gather", "scatter", "reduce_scatter"):
        transport = transport_for(work, devices, large)
        assert isinstance(transport, RelayedCopies)
        assert transport.relays.keys() == {(devices[0], devices[2]), (devices[2], devices[0])}
    with comm.using(transport="host"):
        assert not isinstance(transport_for("broadcast", devices, large), TorchCopies)
    # A device that is no part of the call does not serve it.
    assert transport_for("broadcast", devices[::2], large) == STAR


@on_devices
@pytest.mark.slots(4)
def test_small_and_odd_tensors_are_sent_as_they_are(ring: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_LEAST_BYTES", 4 * 100)
    transport = transport_for("scatter", ring, [])
    ones = torch.ones(200, device=ring[0])
    for tensor in (ones[:99], ones[:100], torch.diag(ones).to_sparse(), torch.complex(ones, ones).conj()):
        with timeline() as recorded:
            sent = transport.send(tensor, ring[2])
        hops = [launch.copy for launch in recorded.recording.launches if launch.copy is not None]
        assert (len({*hops}) == 2) == (tensor.shape == (100,))
        assert sent.layout == tensor.layout
        assert torch.equal(sent.to_dense().cpu(), tensor.to_dense().cpu())


def into(out: list[Tensor], fill: Callable[[list[Tensor]], object]) -> list[Tensor]:
    fill(out)
    return out


COLLECTIVES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "broadcast": lambda x: comm.broadcast(x[0], [each.device for each in x]),
    "broadcast into": lambda x: into([each.clone() for each in x[1:]], lambda out: comm.broadcast(x[0], out=out)),
    "broadcast_coalesced": lambda x: [
        copy for copies in comm.broadcast_coalesced([x[0], x[0].t()], [each.device for each in x]) for copy in copies
    ],
    "scatter": lambda x: comm.scatter(x[0], [each.device for each in x]),
    "gather": lambda x: [comm.gather(x)],
    "gather of views": lambda x: [comm.gather([each[:, ::2] for each in x])],
    "reduce_add": lambda x: [comm.reduce_add(x, x[1].device)],
    "reduce_add_coalesced": lambda x: comm.reduce_add_coalesced([[each, each[0]] for each in x], x[2].device),
    "reduce_scatter": lambda x: into([each[0].clone() for each in x], lambda out: comm.reduce_scatter(x, out)),
    "copy_each": lambda x: into([torch.empty_like(x[0]) for _ in x], lambda out: comm.copy_each(out, x)),
}


@on_devices
@pytest.mark.slots(4)
@pytest.mark.parametrize("route", ["star", "chain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bits_are_equal_and_no_copy_is_between_devices_that_are_no_peers(
    collective: str, dtype: torch.dtype, route: str, ring: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = [torch.randn(4, 3 * 2**18).to(dtype).to(device) for device in ring]
    with monkeypatch.context() as patched, comm.using(transport="copy", route=route):
        patched.setattr(torch.get_device_module(), "can_device_access_peer", lambda a, b: a != b)
        expected = COLLECTIVES[collective](x)
    transport_choice.forget()
    with timeline() as recorded, comm.using(transport="copy", route=route):
        found = COLLECTIVES[collective](x)
        check_clocks()
    assert [each.device for each in found] == [each.device for each in expected]
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True))
    at = {device.index: position for position, device in enumerate(ring)}
    copies = [launch.copy for launch in recorded.recording.launches if launch.copy is not None]
    assert copies
    for copy in copies:
        assert -1 in copy or (at[copy[0]] - at[copy[1]]) % 4 != 2


# ---- orders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def through(ring: list) -> tuple[RelayedCopies, torch.device]:
    """A transport, and the relay between the first and the third of four devices."""
    transport = transport_for("broadcast", ring, [])
    assert isinstance(transport, RelayedCopies)
    return transport, transport.relays[ring[0], ring[2]]


@on_devices
@pytest.mark.slots(4)
def test_the_relays_computing_neither_waits_nor_is_waited_for(through: tuple, ring: list) -> None:
    transport, relay = through
    source, target, beside = (torch.ones(8, 8, device=device) for device in (ring[0], ring[2], relay))
    with timeline() as recorded:
        beside.mul_(2)
        transport.copy(target, source)
        beside.mul_(2)
    launches = recorded.recording.launches
    before, *hops, after = launches
    assert [hop.copy for hop in hops] == [(ring[0].index, relay.index), (relay.index, ring[2].index)]
    assert not after.waits
    for hop in hops:
        assert before.index not in hop.waits
        assert before.stream not in (hop.stream, hop.joins)


def written_first(transport: RelayedCopies, ring: list) -> None:
    """The source is written on another stream, for which only the target's stream waits. Both streams go on after."""
    source, target = torch.zeros(64, device=ring[0]), torch.zeros(64, device=ring[2])
    streams = {device: torch.Stream(device) for device in ring}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))
    writing = torch.Stream(ring[0])
    writing.wait_stream(torch.accelerator.current_stream(ring[0]))
    with streams_set({ring[0]: writing}):
        source.fill_(3)
    Event(writing).make_wait(streams[ring[2]])
    with streams_set(streams):
        transport.copy(target, source)
        target.add_(1)
        source.fill_(5)
    for device, stream in streams.items():
        torch.accelerator.current_stream(device).wait_stream(stream)
    assert target.tolist() == [4] * 64


def used_after_the_sender(transport: RelayedCopies, ring: list) -> None:
    """Who waits for an event of the sending stream may write to what has been received."""
    source, target = torch.ones(64, device=ring[0]), torch.zeros(64, device=ring[2])
    streams = {device: torch.Stream(device) for device in ring}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))
    with streams_set(streams):
        transport.copy(target, source)
        sent = Event(streams[ring[0]])
    sent.make_wait(torch.accelerator.current_stream(ring[2]))
    target.add_(1)
    assert target.tolist() == [2] * 64


USES = {0: written_first, 1: used_after_the_sender}
"""For each event of a copy, in their order, what needs it."""


@on_devices
@pytest.mark.slots(4)
@pytest.mark.parametrize("use", USES.values())
def test_a_relayed_copy_is_ordered_as_one_by_torch(use: Callable, through: tuple, ring: list) -> None:
    use(through[0], ring)
    check_clocks()


@on_devices
@pytest.mark.slots(4)
@pytest.mark.parametrize("left_out", USES)
def test_an_event_that_is_left_out_is_found(
    left_out: int, through: tuple, ring: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Event] = []

    class Faulty(Event):
        def make_wait(self, stream: torch.Stream) -> None:
            waits.append(self)
            if len(waits) != left_out + 1:
                super().make_wait(stream)

    monkeypatch.setattr(relays, "Event", Faulty)
    with pytest.raises(RuntimeError, match="race"):
        USES[left_out](through[0], ring)
    with suppress(RuntimeError):  # memory that has been freed too early, which no later test shall hear of
        settle()
    assert len(waits) > left_out


@pytest.mark.devices("stand-in")
@pytest.mark.slots(4)
@pytest.mark.parametrize("is_held", [True, False])
def test_the_relay_may_empty_its_cache_meanwhile(
    is_held: bool, through: tuple, ring: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_held:
        monkeypatch.setattr(relays, "hold", lambda memory, event: True)
    held.let_go()
    source, target = (torch.ones(16 << 20, device=device) for device in (ring[0], ring[2]))
    for device in ring:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    through[0].copy(target, source)

    def empty() -> None:
        torch.cuda.empty_cache()
        check_clocks()

    if is_held:
        empty()
    else:
        with pytest.raises(RuntimeError, match=r"freed too early: .* ceases to exist"):
            empty()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 96) for width in (24, 96, 96))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def sharded(net: Net, slots: list, **options: Any) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer, devices=slots, **options)
    return fully_shard(net, devices=slots, **options)


FORMS: dict[str, Callable[[Net, list], nn.Module]] = {
    "DataParallel": lambda net, slots: DataParallel(net, slots),
    "replicate": lambda net, slots: replicate(net, devices=slots),
    "fully_shard": sharded,
    "fully_shard, kept": lambda net, slots: sharded(net, slots, reshard_after_forward=False),
}


@pytest.fixture
def cube_mesh(access: Callable, slots: list, monkeypatch: pytest.MonkeyPatch) -> None:
    if len({*slots}) < 8:
        pytest.skip("slots share devices")
    access(HYBRID_CUBE_MESH)
    monkeypatch.setenv("DATAPARALLEL_TRANSPORT", "copy")


@on_devices
@pytest.mark.slots(8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", ["", "chain"])
def test_steps_in_a_hybrid_cube_mesh(
    route: str, form: str, cube_mesh: None, slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step equals that of the module on one device, and the clocks see nothing."""
    monkeypatch.setenv("DATAPARALLEL_ROUTE", route)
    torch.manual_seed(0)
    alone = Net().to(root).double()
    net = Net().to(root).double()
    net.load_state_dict(alone.state_dict())
    model = FORMS[form](net, slots)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(3):
        x = torch.randn(16, 24).double().to(root)
        losses = [each(x).square().mean() for each in (alone, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.allclose(losses[1].cpu(), losses[0].cpu(), rtol=1e-9)
        check_clocks()
