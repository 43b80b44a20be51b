"""A unit on a slot: gathered once, full while it is used, freed by its events, and sharded whatever goes wrong."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from clocked import check_clocks
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.units.buffers import FullBuffer, Precision
from dataparallel.sharded.units.shards import wait_for
from dataparallel.sharded.units.slot_unit import SlotUnit
from dataparallel.sharded.units.unit import Unit
from made_units import unit_of, values


@pytest.fixture
def unit(slots: list) -> Unit:
    """Two parameters; parts of the second are uneven."""
    return unit_of(WHOLE, slots)


WHOLE = [values(1)[0], torch.arange(5.0)]


@pytest.fixture
def slot_unit(unit: Unit) -> SlotUnit:
    return unit.slot_units[0]


def ready(unit: Unit) -> dict[torch.device, Event]:
    return unit.streams.now()


def let_owners_write(unit: Unit) -> None:
    """Orders the computing streams after all pulls, as a call does at its end."""
    wait_for(unit.streams.after_pulls(), current_streams(unit.slots).values())


def is_freed(slot_unit: SlotUnit) -> bool:
    return not slot_unit.is_full and all(p.untyped_storage().nbytes() == 0 for p in slot_unit.parameters if p.numel())


def read(slot_unit: SlotUnit) -> list[Tensor]:
    """The values, read by the computing stream."""
    return [parameter.detach().clone() for parameter in slot_unit.parameters]


def assert_full(slot_unit: SlotUnit, expected: list[Tensor]) -> None:
    assert slot_unit.is_full
    for found, value in zip(read(slot_unit), expected, strict=True):
        assert found.device == slot_unit.device
        assert torch.equal(found.cpu(), value.to(found.dtype))


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each pull, by a kernel or by copies, the number of pieces."""
    made: list[int] = []
    by_copies, by_kernel = FullBuffer.pull, FullBuffer.pull_by

    def pull(self: FullBuffer, pieces: Any, *others: Any) -> None:
        made.append(len(pieces))
        by_copies(self, pieces, *others)

    def pull_by(self: FullBuffer, table: Any, pieces: Any, *others: Any) -> None:
        made.append(len(pieces))
        by_kernel(self, table, pieces, *others)

    monkeypatch.setattr(FullBuffer, "pull", pull)
    monkeypatch.setattr(FullBuffer, "pull_by", pull_by)
    return made


class TestAGather:
    def test_brings_each_slot_the_whole_parameters(self, unit):
        for slot_unit in unit.slot_units:
            assert is_freed(slot_unit)
            slot_unit.make_full(ready(unit))
        for slot_unit in unit.slot_units:
            assert_full(slot_unit, WHOLE)

    def test_casts_on_the_way(self, slots):
        unit = unit_of(WHOLE, slots, Precision(parameters=torch.float16))
        for slot_unit in unit.slot_units:
            slot_unit.make_full(ready(unit))
            assert slot_unit.parameters[0].dtype == torch.float16
            assert_full(slot_unit, WHOLE)

    def test_is_made_once_by_threads_that_ask_at_the_same_time(self, unit, slot_unit, pulls):
        events = ready(unit)
        threads = [threading.Thread(target=slot_unit.make_full, args=(events,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pulls) == len(unit.owned)
        assert_full(slot_unit, WHOLE)

    @pytest.mark.parametrize("write", [lambda parameter: parameter.add_(1), lambda parameter: parameter.data.add_(1)])
    @pytest.mark.parametrize("kept_by", ["unshard", "the end of a backward"])
    def test_of_former_values_is_dropped_and_of_current_ones_stays(self, kept_by, write, unit, slot_unit):
        unit.reshard_after_backward = False
        slot_unit.start(ready(unit))
        if kept_by == "unshard":
            slot_unit.unshard(ready(unit))
        else:
            slot_unit.note_pass_end(has_failed=False, was_recorded=False)
        slot_unit.drop_old_values()
        assert slot_unit.is_started
        let_owners_write(unit)
        with torch.no_grad():
            write(unit.parameters[0])
        slot_unit.drop_old_values()
        assert not slot_unit.is_started
        slot_unit.make_full(ready(unit))
        assert_full(slot_unit, [WHOLE[0] + 1, WHOLE[1]])


class TestAFree:
    def test_after_forward_comes_when_all_modules_have_run_or_at_the_end(self, unit, slot_unit):
        unit.number_of_modules = 2
        for last in (lambda: slot_unit.note_module_end(0, True), lambda: slot_unit.note_forward_end(has_failed=False)):
            slot_unit.make_full(ready(unit))
            slot_unit.note_module_end(1, True)
            slot_unit.note_module_end(1, True)
            assert slot_unit.is_full
            last()
            assert is_freed(slot_unit)


@pytest.mark.devices("sim", "stand-in")
class TestOrders:
    """The clocks raise if an event is missing."""

    def test_pulls_follow_what_the_owners_wrote(self, unit):
        with torch.no_grad():
            unit.parameters[0].mul_(2)
        slot_unit = unit.slot_units[2]
        slot_unit.start(ready(unit))
        slot_unit.make_full(ready(unit))
        assert_full(slot_unit, [2 * WHOLE[0], WHOLE[1]])

    def test_pulls_of_casts_follow_the_casts(self, slots):
        unit = unit_of(WHOLE, slots, Precision(parameters=torch.float32))
        for _ in range(2):
            for slot_unit in unit.slot_units:
                slot_unit.make_full(ready(unit))
                read(slot_unit)
                check_clocks()
            unit.free()
            let_owners_write(unit)
            with torch.no_grad():
                unit.parameters[0].mul_(2)

    def test_owners_write_again_after_the_pulls(self, unit, slots):
        for slot_unit in unit.slot_units:
            slot_unit.start(ready(unit))
        let_owners_write(unit)
        with torch.no_grad():
            unit.parameters[0].mul_(2)

    def test_a_matrix_is_free_after_the_copy_out(self, unit):
        slot_unit = unit.slot_units[1]
        for _ in range(3):
            slot_unit.make_full(ready(unit))
            check_clocks()
            slot_unit.free()
            check_clocks()

    def test_a_gather_that_was_not_used_is_free_for_the_receiving_stream(self, unit):
        slot_unit = unit.slot_units[1]
        slot_unit.start(ready(unit))
        slot_unit.free()
        check_clocks()

    @pytest.mark.parametrize("comes_back", [True, False])
    def test_another_computing_stream_follows_the_last_one(self, unit, comes_back):
        """And the memory, which belongs to the stream that made it full, follows the other one."""
        slot_unit, device = unit.slot_units[1], unit.slots[1]
        slot_unit.make_full(ready(unit))
        with streams_set({device: torch.Stream(device)}):
            slot_unit.make_full(ready(unit))
            read(slot_unit)
        if comes_back:
            slot_unit.make_full(ready(unit))
        slot_unit.free()
        check_clocks()
