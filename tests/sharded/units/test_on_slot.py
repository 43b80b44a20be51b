"""A unit on a slot: gathered once, full while it is used, freed by its events, and sharded whatever goes wrong."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from clocked import check_clocks
from dataparallel import comm
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.units import buffers
from dataparallel.sharded.units.bindings import Precision
from dataparallel.sharded.units.on_slot import UnitOnSlot
from dataparallel.sharded.units.shards import wait_for
from dataparallel.sharded.units.unit import Unit
from made_units import Registry, unit_of, values


@pytest.fixture
def unit(slots: list) -> Unit:
    """Two parameters; parts of the second are uneven."""
    return unit_of(WHOLE, slots)


WHOLE = [values(1)[0], torch.arange(5.0)]


@pytest.fixture
def on_slot(unit: Unit) -> UnitOnSlot:
    return unit.on_slots[0]


def ready(unit: Unit) -> dict[torch.device, Event]:
    return unit.streams.now()


def let_owners_write(unit: Unit) -> None:
    """Orders the computing streams after all pulls, as a call does at its end."""
    wait_for(unit.take_pulls(), current_streams(unit.slots).values())


def is_freed(on_slot: UnitOnSlot) -> bool:
    return not on_slot.is_full and all(p.untyped_storage().nbytes() == 0 for p in on_slot.parameters if p.numel())


def read(on_slot: UnitOnSlot) -> list[Tensor]:
    """The values, read by the computing stream."""
    return [parameter.detach().clone() for parameter in on_slot.parameters]


def assert_full(on_slot: UnitOnSlot, expected: list[Tensor]) -> None:
    assert on_slot.is_full
    for found, value in zip(read(on_slot), expected, strict=True):
        assert found.device == on_slot.device
        assert torch.equal(found.cpu(), value.to(found.dtype))


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each pull the number of pieces."""
    made: list[int] = []

    def copy_each(targets: Any, sources: Any) -> None:
        made.append(len(targets))
        real(targets, sources)

    real = comm.copy_each
    monkeypatch.setattr(buffers.comm, "copy_each", copy_each)
    return made


class TestAGather:
    def test_brings_each_slot_the_whole_parameters(self, unit):
        for on_slot in unit.on_slots:
            assert is_freed(on_slot)
            on_slot.make_full(ready(unit))
        for on_slot in unit.on_slots:
            assert_full(on_slot, WHOLE)

    def test_casts_on_the_way(self, slots):
        unit = unit_of(WHOLE, slots, Precision(parameters=torch.float16))
        for on_slot in unit.on_slots:
            on_slot.make_full(ready(unit))
            assert on_slot.parameters[0].dtype == torch.float16
            assert_full(on_slot, WHOLE)

    def test_that_was_started_is_not_made_again(self, unit, on_slot, pulls):
        on_slot.start(ready(unit))
        on_slot.start(ready(unit))
        assert len(pulls) == len(unit.owned)
        assert on_slot.is_started
        assert not on_slot.is_full
        on_slot.make_full(ready(unit))
        on_slot.make_full(ready(unit))
        assert len(pulls) == len(unit.owned)
        assert_full(on_slot, WHOLE)

    def test_is_made_once_by_threads_that_ask_at_the_same_time(self, unit, on_slot, pulls):
        events = ready(unit)
        threads = [threading.Thread(target=on_slot.make_full, args=(events,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pulls) == len(unit.owned)
        assert_full(on_slot, WHOLE)

    def test_is_made_again_after_a_free_into_the_same_tensors(self, unit):
        """Graphs have saved these tensors."""
        on_slot = unit.on_slots[1]
        on_slot.make_full(ready(unit))
        before = [*on_slot.parameters]
        on_slot.free()
        assert is_freed(on_slot)
        on_slot.make_full(ready(unit))
        assert all(a is b for a, b in zip(before, on_slot.parameters, strict=True))
        assert_full(on_slot, WHOLE)

    def test_of_former_values_is_dropped_and_of_current_ones_stays(self, unit, on_slot):
        on_slot.start(ready(unit))
        on_slot.free_if_changed()
        assert on_slot.is_started
        let_owners_write(unit)
        with torch.no_grad():
            unit.parameters[0].add_(1)
        on_slot.free_if_changed()
        assert not on_slot.is_started
        on_slot.make_full(ready(unit))
        assert_full(on_slot, [WHOLE[0] + 1, WHOLE[1]])

    @pytest.mark.devices("sim")
    def test_that_finds_no_room_names_the_unit_and_the_device(self, unit):
        on_slot = unit.on_slots[1]
        torch.sim.set_memory_capacity(torch.sim.memory_allocated(1), 1)
        try:
            message = r"sim:1 has no room for the .* bytes of parameters of the unit 'made'"
            with pytest.raises(torch.OutOfMemoryError, match=message):
                on_slot.make_full(ready(unit))
        finally:
            torch.sim.set_memory_capacity(None, 1)
        assert is_freed(on_slot)
        assert not on_slot.is_started
        on_slot.make_full(ready(unit))
        assert_full(on_slot, WHOLE)


class TestAFree:
    def test_waits_for_the_calls_that_use_the_parameters_and_show_them(self, unit):
        on_slot, registries = unit.on_slots[0], [Registry(), Registry()]
        for registry in registries:
            on_slot.use(ready(unit), registry)
        on_slot.end_use()
        on_slot.free()
        assert_full(on_slot, WHOLE)
        assert all(registry.registered == on_slot.parameters for registry in registries)
        on_slot.end_use()
        on_slot.free()
        assert is_freed(on_slot)
        for registry in registries:
            assert all(a is b for a, b in zip(registry.registered, unit.parameters, strict=True))

    @pytest.mark.parametrize(
        ("reshard", "is_automatic", "has_backward", "is_free"),
        [
            (True, False, True, True),
            (True, False, False, True),
            (False, False, True, False),
            (False, False, False, False),
            (False, True, True, False),
            (False, True, False, True),  # nothing will need it: an evaluation
        ],
    )
    def test_after_forward_is_as_set(self, unit, on_slot, reshard, is_automatic, has_backward, is_free):
        unit.reshard_after_forward, unit.is_reshard_automatic = reshard, is_automatic
        on_slot.make_full(ready(unit))
        on_slot.module_ended(0, has_backward)
        assert is_freed(on_slot) is is_free

    def test_after_forward_comes_when_all_modules_have_run_or_at_the_end(self, unit, on_slot):
        unit.number_of_modules = 2
        for last in (lambda: on_slot.module_ended(0, True), lambda: on_slot.forward_ended(has_failed=False)):
            on_slot.make_full(ready(unit))
            on_slot.module_ended(1, True)
            on_slot.module_ended(1, True)
            assert on_slot.is_full
            last()
            assert is_freed(on_slot)

    def test_of_a_gather_in_vain_comes_at_the_end_of_forward(self, unit, on_slot):
        on_slot.start(ready(unit))
        on_slot.forward_ended(has_failed=False)
        assert not on_slot.is_started

    def test_after_a_failed_forward_comes_whatever_is_set(self, unit, on_slot):
        unit.reshard_after_forward = False
        on_slot.make_full(ready(unit))
        on_slot.forward_ended(has_failed=True)
        assert is_freed(on_slot)

    def test_after_a_recomputation_is_left_to_the_backward(self, unit):
        on_slot, call = unit.on_slots[0], object()
        on_slot.backward_began(call)
        on_slot.make_full(ready(unit))
        on_slot.module_ended(0, True)
        assert on_slot.is_full

    @torch.no_grad()
    @pytest.mark.parametrize("first", ["gradients", "inputs"])
    def test_after_backward_needs_all_gradients(self, unit, first):
        on_slot, calls = unit.on_slots[0], [object(), object()]
        on_slot.make_full(ready(unit))
        for call in calls:
            on_slot.backward_began(call)
        on_slot.backward_ended(calls[0])
        if first == "gradients":
            on_slot.received()
            assert on_slot.is_full
            on_slot.backward_ended(calls[1])
        else:
            on_slot.backward_ended(calls[1])
            assert on_slot.is_full
            on_slot.received()
        assert is_freed(on_slot)

    @torch.no_grad()
    def test_after_backward_of_a_frozen_unit_needs_those_of_inputs_alone(self, slots):
        unit = unit_of(WHOLE, slots, requires_grad=False)
        on_slot, call = unit.on_slots[0], object()
        on_slot.make_full(ready(unit))
        on_slot.backward_began(call)
        on_slot.backward_ended(call)
        assert is_freed(on_slot)

    @torch.no_grad()
    def test_gradients_of_an_earlier_backward_do_not_count(self, unit, on_slot):
        on_slot.make_full(ready(unit))
        on_slot.backward_began(None)
        on_slot.received()
        call = object()
        on_slot.backward_began(call)
        on_slot.make_full(ready(unit))
        on_slot.backward_ended(call)
        assert on_slot.is_full

    @pytest.mark.parametrize("has_failed", [False, True])
    @pytest.mark.parametrize("reshard", [False, True])
    def test_at_the_end_of_a_pass(self, unit, reshard, has_failed):
        unit.reshard_after_backward = reshard
        on_slot, call = unit.on_slots[0], object()
        on_slot.make_full(ready(unit))
        on_slot.backward_began(call)
        on_slot.received()
        on_slot.pass_ended(has_failed, was_recorded=False)
        assert is_freed(on_slot) is (reshard or has_failed)
        assert not on_slot.is_in_backward

    def test_a_recorded_pass_leaves_all_for_a_pass_through_its_graph(self, unit):
        on_slot, call = unit.on_slots[0], object()
        on_slot.make_full(ready(unit))
        on_slot.backward_began(call)
        on_slot.received()  # gradients are recorded here
        on_slot.backward_ended(call)
        on_slot.pass_ended(has_failed=False, was_recorded=True)
        assert_full(on_slot, WHOLE)
        on_slot.pass_ended(has_failed=False, was_recorded=False)
        assert is_freed(on_slot)


@pytest.mark.devices("sim", "stand-in")
class TestOrders:
    """The clocks raise if an event is missing."""

    def test_pulls_follow_what_the_owners_wrote(self, unit):
        with torch.no_grad():
            unit.parameters[0].mul_(2)
        on_slot = unit.on_slots[2]
        on_slot.start(ready(unit))
        on_slot.make_full(ready(unit))
        assert_full(on_slot, [2 * WHOLE[0], WHOLE[1]])

    def test_pulls_of_casts_follow_the_casts(self, slots):
        unit = unit_of(WHOLE, slots, Precision(parameters=torch.float32))
        for _ in range(2):
            for on_slot in unit.on_slots:
                on_slot.make_full(ready(unit))
                read(on_slot)
                check_clocks()
            unit.free()
            let_owners_write(unit)
            with torch.no_grad():
                unit.parameters[0].mul_(2)

    def test_owners_write_again_after_the_pulls(self, unit, slots):
        for on_slot in unit.on_slots:
            on_slot.start(ready(unit))
        let_owners_write(unit)
        with torch.no_grad():
            unit.parameters[0].mul_(2)
        assert unit.take_pulls() == []

    def test_a_matrix_is_free_after_the_copy_out(self, unit):
        on_slot = unit.on_slots[1]
        for _ in range(3):
            on_slot.make_full(ready(unit))
            check_clocks()
            on_slot.free()
            check_clocks()

    def test_a_gather_that_was_not_used_is_free_for_the_receiving_stream(self, unit):
        on_slot = unit.on_slots[1]
        on_slot.start(ready(unit))
        on_slot.free()
        check_clocks()

    @pytest.mark.parametrize("comes_back", [True, False])
    def test_another_computing_stream_follows_the_last_one(self, unit, comes_back):
        """And the memory, which belongs to the stream that made it full, follows the other one."""
        on_slot, device = unit.on_slots[1], unit.slots[1]
        on_slot.make_full(ready(unit))
        with streams_set({device: torch.Stream(device)}):
            on_slot.make_full(ready(unit))
            read(on_slot)
        if comes_back:
            on_slot.make_full(ready(unit))
        on_slot.free()
        check_clocks()
