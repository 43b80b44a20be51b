"""The order in which units are gathered, freed and summed, for the prefetch that a user can choose.

This is the order of calls on the host, for each slot. That streams wait for the right events is what the clocks see in
the other tests. A line of a record is "what unit": "forward" and "backward" when a unit begins there, "gather" when the
slot starts to pull it, "free" when it drops it, "deliver" when it brings gradients. "0" to "3" are the blocks.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded.units.calls import RootCall
from dataparallel.sharded.units.gradients import UnitGradients, UnitSums
from dataparallel.sharded.units.slot_unit import SlotUnit
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
    """What happened on each slot since `clear`, and which units were summed in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clear()
        self._monkeypatch = monkeypatch
        self._around(SlotUnit, "start", "gather", lambda slot_unit: slot_unit.is_started, becomes=True)
        self._around(SlotUnit, "free", "free", lambda slot_unit: slot_unit.is_started, becomes=False)
        self._before(RootCall, "begin_unit", "forward", lambda call, slot_unit: (slot_unit.slot, slot_unit.unit))
        self._before(
            RootCall, "gather_for_backward", "backward", lambda call, slot_unit, *_: (slot_unit.slot, slot_unit.unit)
        )
        self._before(UnitGradients, "deliver", "deliver", lambda of, slot, grads, sums: (slot, of._unit))
        self._before(UnitSums, "add_up", "sum", lambda of, found, sums: ("sums", of._unit))

    def clear(self) -> None:
        self._lines: dict[Any, list[str]] = defaultdict(list)

    def add(self, where: Any, what: str, unit: Any) -> None:
        """A line. Each slot is worked for by one thread at a time."""
        self._lines[where].append(f"{what} {unit.name.removeprefix('blocks.').replace('Net', 'root')}")

    def of_slots(self, slots: list[Any]) -> list[list[str]]:
        return [self._lines[slot] for slot in range(len(slots))]

    @property
    def sums(self) -> list[str]:
        return [line.split()[1] for line in self._lines["sums"]]

    def _around(self, of: Any, name: str, what: str, state: Callable[[Any], bool], becomes: bool) -> None:
        real = getattr(of, name)

        def recorded(slot_unit: Any, *args: Any, **kwargs: Any) -> None:
            with slot_unit._lock:
                before = state(slot_unit)
                real(slot_unit, *args, **kwargs)
                if state(slot_unit) == becomes != before:
                    self.add(slot_unit.slot, what, slot_unit.unit)

        self._monkeypatch.setattr(of, name, recorded)

    def _before(self, of: Any, name: str, what: str, place: Callable[..., tuple[Any, Any]]) -> None:
        real = getattr(of, name)

        def recorded(*args: Any) -> Any:
            self.add(place(*args)[0], what, place(*args)[1])
            return real(*args)

        self._monkeypatch.setattr(of, name, recorded)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    return Record(monkeypatch)


def run_steps(model: Any, slots: list[Any], record: Record, steps: int = 2) -> tuple[list[list[str]], list[list[str]]]:
    """For each slot the lines of forward and of backward of the last step."""
    optimizer = sgd(model.parameters())
    forward: list[list[str]] = []
    for _ in range(steps):
        record.clear()
        loss = model(batch(slots)).square().mean()
        forward = record.of_slots(slots)
        record.clear()
        loss.backward()
        optimizer.step()
    return forward, record.of_slots(slots)


def evaluated(model: Any, slots: list[Any], record: Record) -> list[list[str]]:
    """For each slot the lines of a forward without a graph."""
    record.clear()
    with torch.no_grad():
        model(batch(slots))
    return record.of_slots(slots)


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
    backward 3, gather 2, deliver 3, free 3,
    backward 2, gather 1, deliver 2, free 2,
    backward 1, gather 0, deliver 1, free 1,
    backward 0, deliver 0, free 0,
    deliver root, free root"""
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
    backward 3, gather 3, deliver 3, free 3,
    backward 2, gather 2, deliver 2, free 2,
    backward 1, gather 1, deliver 1, free 1,
    backward 0, gather 0, deliver 0, free 0,
    deliver root, free root"""
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
    backward 3, gather 1, deliver 3, free 3,
    backward 2, gather 0, deliver 2, free 2,
    backward 1, deliver 1, free 1,
    backward 0, deliver 0, free 0,
    deliver root, free root"""
)
SUMS = ["3", "2", "1", "0", "root"]

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
    assert record.sums == SUMS


@each_number_of_slots
def test_units_are_gathered_ahead_from_backward_on_when_no_forward_is_known_yet(slots, record):
    forward, backward = run_steps(build(slots), slots, record, steps=1)
    assert forward == [FORWARD_WITHOUT] * len(slots)
    assert backward == [BACKWARD] * len(slots)
    assert record.sums == SUMS


@each_number_of_slots
class TestReshard:
    def test_not_after_backward_keeps_units_until_the_optimizer_has_changed_them(self, slots, record):
        model = build(slots)
        model.set_reshard_after_backward(False)
        forward, backward = run_steps(model, slots, record)
        frees = words("free root, free 0, free 1, free 2, free 3")
        assert forward == [frees + FORWARD] * len(slots)
        assert backward == [[line for line in BACKWARD if "free" not in line]] * len(slots)

    def test_after_a_forward_without_a_graph_leaves_nothing(self, slots, record):
        model = build(slots)
        run_steps(model, slots, record)
        assert evaluated(model, slots, record) == [[*FORWARD, "free root"]] * len(slots)

    def test_not_after_forward_keeps_units_for_a_backward_and_not_for_the_next_call(self, slots, record):
        """What was written to their parameters meanwhile may be seen nowhere."""
        model = build(slots, reshard_after_forward=False)
        run_steps(model, slots, record)
        gathers = [line for line in FORWARD if "free" not in line]
        assert evaluated(model, slots, record) == [gathers] * len(slots)
        frees = words("free root, free 0, free 1, free 2, free 3")
        assert evaluated(model, slots, record) == [frees + gathers] * len(slots)

    def test_not_after_forward_keeps_units_that_the_user_has_gathered(self, slots, record):
        model = build(slots, reshard_after_forward=False)
        for unit in (*model.blocks, model):
            unit.unshard()
        for _ in range(2):
            assert evaluated(model, slots, record) == [[line for line in FORWARD if "forward" in line]] * len(slots)
