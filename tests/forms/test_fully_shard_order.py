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
from torch import nn

from dataparallel.sharded.units.calls import RootCall
from dataparallel.sharded.units.gradients import UnitGradients, UnitSums
from dataparallel.sharded.units.slot_unit import SlotUnit
from dataparallel.testing.cases import seeded, sgd, tokens
from dataparallel.testing.steps import mean_square_loss
from sharded_models import GPT, LENGTH, VOCABULARY, Block
from sharded_steps import on_device, sharded


class FourBlocks(GPT):
    def __init__(self, recomputed: str = "nothing", use_reentrant: bool = False) -> None:
        super().__init__(recomputed, use_reentrant)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks if recomputed == "inside" else ():
            block.recomputed = use_reentrant


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
        self._lines[where].append(f"{what} {unit.name.removeprefix('blocks.').replace('FourBlocks', 'root')}")

    def on(self, slot: int, *kinds: str) -> list[str]:
        """The lines of a slot, all or those of some kinds."""
        return [line for line in self._lines[slot] if not kinds or line.split()[0] in kinds]

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
    for seed in range(steps):
        (batch,), _ = tokens(LENGTH, VOCABULARY)(2 * len(slots), seed)
        record.clear()
        loss = mean_square_loss(model(batch.to(slots[0])))
        forward = [record.on(slot) for slot in range(len(slots))]
        record.clear()
        loss.backward()
        optimizer.step()
    return forward, [record.on(slot) for slot in range(len(slots))]


def evaluated(model: Any, slots: list[Any], record: Record) -> list[list[str]]:
    """For each slot the lines of a forward without a graph."""
    record.clear()
    (batch,), _ = tokens(LENGTH, VOCABULARY)(2 * len(slots), 0)
    with torch.no_grad():
        model(batch.to(slots[0]))
    return [record.on(slot) for slot in range(len(slots))]


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split(",")]


def build(slots: list[Any], *model: Any, **options: Any) -> Any:
    return sharded(on_device(seeded(FourBlocks, *model), slots[0]), slots, **options)


def lists_ahead(model: Any, forward: Callable[[int], list[int]], backward: Callable[[int], list[int]]) -> Any:
    """Sets what is gathered ahead of each unit, as numbers of units: -1 is the root, which comes first in forward."""
    units = [*model.blocks, model]
    for number in range(-1, 4):
        units[number].set_modules_to_forward_prefetch([units[other] for other in forward(number)])
        units[number].set_modules_to_backward_prefetch([units[other] for other in backward(number)])
    return model


def no_prefetch(model: Any) -> Any:
    return lists_ahead(model, lambda number: [], lambda number: [])


def two_ahead(model: Any) -> Any:
    """The next two blocks in forward; in backward those before, the nearest first. The root's backward comes first."""
    return lists_ahead(
        model,
        lambda number: [other for other in (number + 1, number + 2) if other < 4],
        lambda number: [3, 2] if number == -1 else [other for other in (number - 1, number - 2) if other >= 0],
    )


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
    "nothing ahead with empty lists": (lambda slots: no_prefetch(build(slots)), FORWARD_WITHOUT, BACKWARD_WITHOUT),
    "the lists of the user": (lambda slots: two_ahead(build(slots)), FORWARD_TWO_AHEAD, BACKWARD_TWO_AHEAD),
    "checkpoints inside units change nothing": (lambda slots: build(slots, "inside"), FORWARD, BACKWARD),
    # The recomputation finds the unit gathered: its backward has begun.
    "checkpoints around units change nothing": (lambda slots: build(slots, "around"), FORWARD, BACKWARD),
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
class TestCheckpoints:
    def test_that_are_reentrant_inside_units_deliver_twice(self, slots, record):
        """What is recomputed has a backward of its own inside that of the unit, which is freed after both."""
        forward, backward = run_steps(build(slots, "inside", True), slots, record)
        assert forward == [FORWARD] * len(slots)
        twice = [
            line
            for line in BACKWARD
            for _ in range(2 if line in words("deliver 0, deliver 1, deliver 2, deliver 3") else 1)
        ]
        assert backward == [twice] * len(slots)
        assert record.sums == ["3", "3", "2", "2", "1", "1", "0", "0", "root"]

    def test_that_are_reentrant_around_units_gather_when_they_recompute(self, slots, record):
        """The outputs of these units belong to no graph in forward, so nothing says that their backward comes next."""
        forward, backward = run_steps(build(slots, "around", True), slots, record)
        assert forward == [FORWARD] * len(slots)
        of_blocks = [f"{what} {block}" for block in (2, 1, 0) for what in ("gather", "deliver", "free")]
        assert backward == [
            [*words("backward root, gather 3, deliver 3, free 3"), *of_blocks, *words("deliver root, free root")]
        ] * len(slots)
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
