"""``reshard_after_forward=k``: between forward and backward groups of k slots have the parameters, a piece on each."""

import threading
import weakref
from typing import Any

import pytest
import torch
from loops import wait_for_the_engine
from torch import Tensor, nn

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.composable import fully_shard
from dataparallel.sharded.units import unit as units_unit
from dataparallel.sharded.units.gather import PullSource
from dataparallel.sharded.units.unit import TreeStreams
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import assert_equal, mean_square_loss
from freed_later import freed_later
from made_units import recorded_gathers
from memory import allocated
from sharded_steps import (
    MODELS,
    assert_all_sharded,
    assert_same_training,
    gradients,
    on_device,
    sharded,
    whole,
)

WIDTH = 16
GROUP = 2


class Layers(nn.Module):
    """Layers of odd shapes, each a unit. Nothing else has parameters but the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(WIDTH, 3)
        self.fails = [""]

    def units(self) -> list[nn.Module]:
        return [*self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 2 and self.fails[0] == "forward":
                raise ArithmeticError("in forward")
            if number == 2 and self.fails[0] == "backward" and x.requires_grad:
                x.register_hook(fail)
        return self.last(x * self.scale)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("in backward")


def rows(slots: list, seed: int = 0) -> Tensor:
    (x,), _ = numbers(WIDTH)(2 * len(slots), seed)
    return x.to(slots[0])


def make(slots: list, **options: Any) -> Any:
    return sharded(on_device(seeded(Layers), slots[0]), slots, **{"reshard_after_forward": GROUP, **options})


def units(model: Any) -> list[Any]:
    return [fully_shard.state(module).unit for module in (*model.layers, model)]


def pieces(model: Any) -> list[Any]:
    sources = {source for unit in units(model) for source in unit.sources._kept.values()}
    return [piece for source in sources for piece in source._pieces.values()]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[PullSource]:
    """The sources that slots have pulled from, each slot by itself."""
    return recorded_gathers(monkeypatch)


@pytest.mark.slots(4, long=[8])
@pytest.mark.parametrize("model", MODELS)
def test_each_model_trains_as_on_one_device(model, slots):
    """Loops and other options are drawn by test_state_machine."""
    assert_same_training(MODELS[model], slots, steps=3, reshard_after_forward=GROUP)


@pytest.mark.devices("sim")
class TestMemory:
    @pytest.mark.slots(4, long=[8])
    def test_a_slot_keeps_one_part_of_as_many_as_its_group_has_slots(self, slots):
        held = {}
        for option in (True, GROUP, False):
            model = make(slots, reshard_after_forward=option)
            mean_square_loss(model(rows(slots))).backward()  # some memory stays for good
            model.zero_grad()
            idle = allocated(slots)
            with_graph = model(rows(slots))
            held[option] = [now - before for now, before in zip(allocated(slots), idle, strict=True)]
            del with_graph, model
        full = 4 * (WIDTH + 1) * WIDTH * 8 + ((WIDTH + 1) * 3 + 1) * 8
        for slot, nothing, pieces, everything in zip(slots, *held.values(), strict=True):
            count = slots.count(slot)  # slots on this device
            assert count * full / GROUP <= pieces - nothing <= count * (full / GROUP + 500)
            assert everything - nothing >= count * full

    @pytest.mark.slots(4, long=[8])
    def test_backward_frees_them_as_it_goes(self, slots):
        model = make(slots)
        mean_square_loss(model(rows(slots))).backward()
        model.zero_grad()
        idle = allocated(slots)
        loss = mean_square_loss(model(rows(slots)))
        seen: list[int] = []
        first = units(model)[0].gradients
        deliver = first.deliver

        def counted(slot: int, *args: Any) -> Any:
            seen.append(len(pieces(model)))
            return deliver(slot, *args)

        first.deliver = counted
        assert len(pieces(model)) == 5 * len(slots)
        loss.backward()
        assert seen[-1] == 0  # when the last slot delivers gradients of the first layer, all have read all pieces
        model.zero_grad()
        del loss
        assert pieces(model) == []
        assert allocated(slots, idle) == idle


class TestWhatIsGatheredFromWhere:
    @pytest.mark.slots(4)
    def test_without_a_full_group_backward_asks_the_owners(self, slots, gathers):
        """Three chunks: the third slot is alone in its group."""
        model, twin = make(slots), on_device(seeded(Layers), slots[0])
        x = rows(slots)[:3]
        loss = mean_square_loss(model(x))
        gathers.clear()
        loss.backward()
        assert len(gathers) == len(units(model))
        mean_square_loss(twin(x)).backward()
        assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)

    @pytest.mark.slots(4)
    def test_a_second_backward_asks_the_owners(self, slots, gathers):
        """The pieces are freed at the end of the first."""
        model = make(slots)
        losses = [mean_square_loss(model(rows(slots, seed))) for seed in range(2)]
        gathers.clear()
        losses[0].backward()
        assert gathers == []
        losses[1].backward()
        assert len(gathers) == len(slots) * len(units(model))


@pytest.mark.slots(4)
def test_pieces_that_are_dropped_while_a_slot_reads_them_last_as_long(slots):
    model = make(slots)
    model(rows(slots))
    unit = units(model)[0]
    expected = whole(model.layers[0].weight)
    source, streams, own = unit.sources._kept[1], unit.streams.pulling[1], unit.streams.receiving[1]
    (flats,), written = source.pieces(1, {})
    unit.free()
    source.drop(0)
    assert not source.is_complete
    for device, event in written:
        event.make_wait(streams[device])
    with streams_set(streams):
        found = [flat.to(slots[1], copy=True) for flat in flats]
        found = [part[: WIDTH * WIDTH // GROUP].clone().cpu() for part in found]
    source.end_pull(1, [] if own is None else [Event(own)])
    assert_equal(torch.cat(found).view(WIDTH, WIDTH), expected, "weight", atol=0)
    alive = [weakref.ref(flat) for flat in flats]
    del source, flats
    assert not any(flat() is not None for flat in alive)


class TestNothingIsKept:
    @pytest.mark.slots(4)
    def test_without_a_graph(self, slots, without_graph):
        model = make(slots)
        with without_graph():
            model(rows(slots))
        assert pieces(model) == []
        assert_all_sharded(model)

    @freed_later
    @pytest.mark.slots(4)
    @pytest.mark.parametrize("kind", ["forward", "backward"])
    def test_after_a_failure(self, kind, slots):
        model, twin = make(slots), on_device(seeded(Layers), slots[0])
        earlier = model(rows(slots))
        assert len(pieces(model)) == 5 * len(slots)
        model.fails[0] = kind
        with pytest.raises(ArithmeticError, match=f"in {kind}"):
            mean_square_loss(model(rows(slots))).backward()
        wait_for_the_engine(slots)
        assert pieces(model) == []
        assert_all_sharded(model)
        model.fails[0] = ""
        model.zero_grad()
        for each in (model, twin):
            mean_square_loss(each(rows(slots))).backward()
        assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)
        del earlier

    @pytest.mark.slots(4)
    def test_of_values_that_have_changed(self, slots):
        model, twin = make(slots), on_device(seeded(Layers), slots[0])
        model(rows(slots))
        kept = pieces(model)
        with torch.no_grad():
            for unit in units(model):
                for parameter in unit.parameters:
                    parameter.mul_(0.5)
            for parameter in twin.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            assert_equal(whole(model(rows(slots))), whole(twin(rows(slots))), "outputs", atol=1e-9)
        assert kept
        assert pieces(model) == []
        assert_all_sharded(model)

    @pytest.mark.slots(4)
    def test_of_an_earlier_call_with_more_slots(self, slots):
        """The last slot has a piece of that call, and nothing shows that its values were written to since."""
        model, twin = make(slots), on_device(seeded(Layers), slots[0])
        earlier = model(rows(slots))
        for unit in units(model):
            for parameter in unit.parameters:
                for shard in parameter.shards:
                    shard.data.mul_(0.5)
        for parameter in twin.parameters():
            parameter.data.mul_(0.5)
        for each in (model, twin):
            leaf = rows(slots)[:3].requires_grad_()
            mean_square_loss(each(leaf)).backward()
            each.of_leaf = leaf.grad
        assert_equal(whole(model.of_leaf), whole(twin.of_leaf), "gradient of the input", atol=1e-9)
        assert_equal(gradients(model), gradients(twin), "gradients", atol=1e-9)
        del earlier


@pytest.mark.devices("sim", "cuda")
def test_of_casts_that_two_threads_note_the_later_events_stay(slots, monkeypatch):
    """A thread that notes casts in the meantime waits, so that its events, which are later, are kept."""
    streams, made, threads = TreeStreams([*map(torch.device, slots)]), [], []

    class Recorded(Event):
        def __init__(self, stream):
            super().__init__(stream)
            made.append(self)
            if len(made) == 1:
                threads.append(threading.Thread(target=streams.note_casts))
                threads[0].start()
                threads[0].join(0.2)

    monkeypatch.setattr(units_unit, "Event", Recorded)
    streams.note_casts()
    threads[0].join()
    count = len({*slots})
    assert [*map(id, streams.last_casts.values())] == [*map(id, made[count:])]
