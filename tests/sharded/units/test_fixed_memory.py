"""The memory in which full parameters come to the same addresses: what regions units get, and when they share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dataparallel.composable import fully_shard
from dataparallel.sharded.units.buffers import FixedAddresses, FixedMemory

pytestmark = pytest.mark.devices("cuda")


def units(slots: list, root: torch.device, *widths: int) -> list[Any]:
    """On the first slot, units of one linear each, which have got their memory from one `FixedMemory`."""
    memory = [FixedMemory(torch.device(slot)) for slot in slots]
    found = []
    for width in widths:
        unit = fully_shard.state(fully_shard(nn.Linear(width, width).to(root), devices=slots)).unit
        unit.fixed_memory = memory
        unit.refresh()
        found.append(unit.slot_units[0])
    return found


def fill(unit: Any) -> list[int]:
    unit.make_full(unit.unit.streams.now())
    return [flat.data_ptr() for flat in unit.flats]


def test_units_of_one_size_take_turns_in_one_region(slots: list, root: torch.device) -> None:
    first, second = units(slots, root, 4, 4)
    before = fill(first)
    first.free()
    assert fill(second) == before
    second.free()
    assert fill(first) == before


def test_a_unit_that_finds_another_one_in_its_region_gets_one_of_its_own(slots: list, root: torch.device) -> None:
    first, second = units(slots, root, 4, 4)
    fill(first)
    first.free()
    there = fill(second)
    elsewhere = fill(first)
    assert elsewhere != there
    first.free()
    second.free()
    assert fill(first) == elsewhere
    assert fill(second) == there


def test_units_of_other_sizes_share_nothing(slots: list, root: torch.device) -> None:
    small, large = units(slots, root, 4, 40)
    fill(small)
    small.free()
    fill(large)
    assert large.region is not small.home


def test_after_a_capture_its_region_stays_the_home(slots: list, root: torch.device) -> None:
    first, second = units(slots, root, 4, 4)
    before = fill(first)
    addresses = FixedAddresses(first)
    first.free()
    fill(second)
    assert fill(first) != before
    assert addresses.are_valid()
    assert not addresses.are_current()
    first.free()
    second.free()
    assert fill(first) == before
    assert addresses.are_current()


@pytest.mark.parametrize("is_taken", [True, False])
def test_parameters_are_restored_to_where_they_were(is_taken: bool, slots: list, root: torch.device) -> None:
    first, second = units(slots, root, 4, 4)
    before = fill(first)
    addresses = FixedAddresses(first)
    first.free()
    fill(second)
    kept = [parameter.clone() for parameter in second.parameters]
    fill(first)
    if not is_taken:
        second.free()
    with addresses.restored():
        if is_taken:
            assert [flat.data_ptr() for flat in second.flats] == before
            assert all(map(torch.equal, first.flats, second.flats))
    if is_taken:
        assert all(map(torch.equal, kept, second.parameters))


def test_parameters_are_not_restored_while_a_forward_reads_what_is_there(slots: list, root: torch.device) -> None:
    first, second = units(slots, root, 4, 4)
    fill(first)
    addresses = FixedAddresses(first)
    first.free()

    class Runner:
        def register(self, parameters: Any) -> None:
            pass

    second.use(second.unit.streams.now(), Runner())
    fill(first)
    refused = pytest.raises(RuntimeError, match="a captured backward needs memory that a forward of the unit")
    with refused, addresses.restored():
        pass
    second.end_use()
    with addresses.restored():
        pass


def test_a_region_is_free_again_if_there_is_no_memory(slots: list, root: torch.device, monkeypatch: Any) -> None:
    first, second = units(slots, root, 4, 4)

    def fail(self: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(type(first._buffers[0]), "allocate", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        fill(first)
    monkeypatch.undo()
    assert first.region is None
    fill(second)
    assert second.region is first.home
