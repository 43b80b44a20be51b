"""The order in which units are gathered and freed, for the prefetch that a user can choose.

This is the order of calls on the host, for each slot. That streams wait for the right events is what the clocks see in
the other tests. A line of a record is "what unit": "forward" and "backward" when a unit begins there, "gather" when the
slot starts to pull it, "free" when it drops it. "0" to "3" are the blocks.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded.units.gather import SlotUnit
from dataparallel.sharded.units.tree import RootCall, Unit
from dataparallel.sharded.units.unit import ShardedUnit
from dataparallel.testing.cases import seeded, sgd
from sharded_steps import on_device, sharded


class Net(nn.Module):
    """Four blocks, which are units, between layers of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(6, 2)

    def units(self) -> list[Any]:
        return [*self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Record:
    """What has happened on each slot since `take`. Each slot is worked for by one thread at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lines: dict[int, list[str]] = defaultdict(list)
        for name, what in (("begin_unit", "forward"), ("gather_for_backward", "backward")):
            self._before(monkeypatch, name, what)
        self._around(monkeypatch, "start", "gather", becomes=True)
        self._around(monkeypatch, "free", "free", becomes=False)

    def take(self, slots: list[Any]) -> list[list[str]]:
        """The lines of each slot."""
        return [self._lines.pop(slot, []) for slot in range(len(slots))]

    def _add(self, what: str, slot: int, unit: ShardedUnit) -> None:
        self._lines[slot].append(f"{what} {unit.name.removeprefix('blocks.').replace('Net', 'root')}")

    def _before(self, monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
        real = getattr(RootCall, name)

        def recorded(call: RootCall, unit: Unit, slot: SlotUnit | int, *args: Any) -> Any:
            self._add(what, slot.slot if isinstance(slot, SlotUnit) else slot, unit)
            return real(call, unit, slot, *args)

        monkeypatch.setattr(RootCall, name, recorded)

    def _around(self, monkeypatch: pytest.MonkeyPatch, name: str, what: str, becomes: bool) -> None:
        real = getattr(SlotUnit, name)

        def recorded(slot_unit: SlotUnit, *args: Any, **kwargs: Any) -> None:
            with slot_unit._lock:
                before = slot_unit.is_started
                real(slot_unit, *args, **kwargs)
                if slot_unit.is_started == becomes != before:
                    self._add(what, slot_unit.slot, slot_unit.unit)

        monkeypatch.setattr(SlotUnit, name, recorded)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    return Record(monkeypatch)


def run_steps(model: Any, slots: list[Any], record: Record, steps: int = 2) -> tuple[list[list[str]], list[list[str]]]:
    """For each slot the lines of forward and of backward of the last step."""
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        record.take(slots)
        loss = model(batch(slots)).square().mean()
        forward = record.take(slots)
        loss.backward()
        optimizer.step()
    return forward, record.take(slots)


def evaluated(model: Any, slots: list[Any], record: Record) -> list[list[str]]:
    """For each slot the lines of a forward without a graph."""
    record.take(slots)
    with torch.no_grad():
        model(batch(slots))
    return record.take(slots)


def batch(slots: list[Any]) -> Tensor:
    return torch.ones(2 * len(slots), 6, dtype=torch.float64, device=slots[0])


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split(",")]


def build(slots: list[Any], **options: Any) -> Any:
    return sharded(on_device(seeded(Net), slots[0]), slots, **options)


def lists_ahead(model: Any, count: int) -> Any:
    """Gathers so many units ahead: in forward those that follow the root or a block, in backward those before it."""
    blocks = [*model.blocks]
    for number, unit in enumerate([model, *blocks]):
        unit.set_modules_to_forward_prefetch(blocks[number : number + count])
        before = blocks[: number - 1] if number else blocks
        unit.set_modules_to_backward_prefetch(before[::-1][:count])
    return model


FORWARD = words(
    """gather root, forward root, gather 0,
    forward 0, gather 1, free 0,
    forward 1, gather 2, free 1,
    forward 2, gather 3, free 2,
    forward 3, free 3"""
)
BACKWARD = words(
    """backward root, gather 3,
    backward 3, gather 2, free 3,
    backward 2, gather 1, free 2,
    backward 1, gather 0, free 1,
    backward 0, free 0,
    free root"""
)
FORWARD_WITHOUT = words(
    """gather root, forward root,
    gather 0, forward 0, free 0,
    gather 1, forward 1, free 1,
    gather 2, forward 2, free 2,
    gather 3, forward 3, free 3"""
)
BACKWARD_WITHOUT = words(
    """backward root,
    backward 3, gather 3, free 3,
    backward 2, gather 2, free 2,
    backward 1, gather 1, free 1,
    backward 0, gather 0, free 0,
    free root"""
)
FORWARD_TWO_AHEAD = words(
    """gather root, forward root, gather 0, gather 1,
    forward 0, gather 2, free 0,
    forward 1, gather 3, free 1,
    forward 2, free 2,
    forward 3, free 3"""
)
BACKWARD_TWO_AHEAD = words(
    """backward root, gather 3, gather 2,
    backward 3, gather 1, free 3,
    backward 2, gather 0, free 2,
    backward 1, free 1,
    backward 0, free 0,
    free root"""
)
each_number_of_slots = pytest.mark.slots(1, 3, long=[8])

ORDERS: dict[str, tuple[Callable[[list[Any]], Any], list[str], list[str]]] = {
    "by default one unit ahead, as the last forward had them": (build, FORWARD, BACKWARD),
    "nothing ahead with empty lists": (
        lambda slots: lists_ahead(build(slots), 0),
        FORWARD_WITHOUT,
        BACKWARD_WITHOUT,
    ),
    "the lists of the user": (lambda slots: lists_ahead(build(slots), 2), FORWARD_TWO_AHEAD, BACKWARD_TWO_AHEAD),
    "not freed after forward": (
        lambda slots: build(slots, reshard_after_forward=False),
        [line for line in FORWARD if "free" not in line],
        [line for line in BACKWARD if "gather" not in line],
    ),
}


@each_number_of_slots
@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_step(name, slots, record):
    make, expected_forward, expected_backward = ORDERS[name]
    forward, backward = run_steps(make(slots), slots, record)
    assert forward == [expected_forward] * len(slots)
    assert backward == [expected_backward] * len(slots)


@each_number_of_slots
def test_units_are_gathered_ahead_from_backward_on_when_no_forward_is_known_yet(slots, record):
    forward, backward = run_steps(build(slots), slots, record, steps=1)
    assert forward == [FORWARD_WITHOUT] * len(slots)
    assert backward == [BACKWARD] * len(slots)


@each_number_of_slots
class TestReshard:
    def test_not_after_backward_keeps_units_until_the_optimizer_has_changed_them(self, slots, record):
        model = build(slots)
        model.set_reshard_after_backward(False)
        forward, backward = run_steps(model, slots, record)
        frees = words("free root, free 0, free 1, free 2, free 3")
        assert forward == [frees + FORWARD] * len(slots)
        assert backward == [[line for line in BACKWARD if "free" not in line]] * len(slots)

    def test_not_after_forward_keeps_units_for_a_backward_and_not_for_the_next_call(self, slots, record):
        """What was written to their parameters meanwhile may be seen nowhere."""
        model = build(slots, reshard_after_forward=False)
        run_steps(model, slots, record)
        gathers = [line for line in FORWARD if "free" not in line]
        assert evaluated(model, slots, record) == [gathers] * len(slots)
        frees = words("free root, free 0, free 1, free 2, free 3")
        assert evaluated(model, slots, record) == [frees + gathers] * len(slots)
