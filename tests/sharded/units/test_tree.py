"""What a tree gathers ahead, what it orders and frees at the end of a call, and what it does before a step."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel.sharded.units.slot_unit import SlotUnit
from dataparallel.sharded.units.tree import RootCall, Tree
from dataparallel.sharded.units.unit import Unit
from made_units import Registry, in_backward, unit_of, values


@pytest.fixture
def units(slots: list) -> list[Unit]:
    return [unit_of(values(), slots) for _ in range(4)]


@pytest.fixture
def tree(units: list[Unit], slots: list) -> Tree:
    return Tree(units, [torch.device(slot) for slot in slots])


def call_units(call: RootCall, units: list[Unit], slots: list[Any], between: Callable[[Unit], Any]) -> None:
    """Calls the units on the slots one after the other, each of which ends before the next begins."""
    for slot in range(len(slots)):
        for unit in units:
            slot_unit: SlotUnit = unit.slot_units[slot]
            slot_unit.use(call.ready, Registry())
            call.begin_unit(unit, slot)
            between(unit)
            slot_unit.end_use()
            call.end_unit(unit, slot)
            slot_unit.note_module_end(0, has_backward=True)


def run(tree: Tree, order: list[Unit], slots: list[Any]) -> list[list[Unit]]:
    """Calls the units in this order, and says which others had been started when each ran."""
    found: list[list[Unit]] = []

    def between(unit: Unit) -> None:
        found.append([each for each in tree.units if each is not unit and each.slot_units[0].is_started])

    tree.prepare()
    with tree.calling(1) as call:
        call_units(call, order, slots[:1], between)
    return found


class TestForward:
    def test_gathers_what_came_next_the_last_time(self, tree, units, slots):
        a, b, c, d = units
        assert run(tree, [a, b, c, d], slots) == [[], [], [], []]
        assert run(tree, [a, b, c, d], slots) == [[b], [c], [d], []]

    def test_follows_a_changed_order_one_call_later(self, tree, units, slots):
        a, b, c, d = units
        run(tree, [a, b, c, d], slots)
        assert run(tree, [a, c, b, d], slots)[0] == [b]
        assert run(tree, [a, c, b, d], slots) == [[c], [b], [d], []]

    def test_that_fails_keeps_the_known_order_and_leaves_nothing(self, tree, units, slots):
        a, b, c, d = units
        run(tree, [a, b, c, d], slots)
        tree.prepare()
        with pytest.raises(KeyError), tree.calling(1) as call:
            call_units(call, [a, c], slots[:1], lambda unit: {}["no"] if unit is c else None)
        for unit in (a, b, d):
            assert not unit.slot_units[0].is_started
        c.slot_units[0].end_use()
        c.free()
        assert run(tree, [a, b, c, d], slots) == [[b], [c], [d], []]


class TestSettling:
    """A backward that has failed raises at once, while other threads may be in nodes of it."""

    @pytest.fixture
    def call(self, tree, units):
        tree.prepare()
        with tree.calling(1) as call:
            pass
        return call

    @pytest.mark.parametrize("use", ["prepare", "unshard", "reshard"])
    def test_waits_until_the_pass_has_ended(self, tree, call, units, use):
        has_joined, may_end, has_settled = (threading.Event() for _ in range(3))

        def settle() -> None:
            {"prepare": tree.prepare, "unshard": lambda: units[0].unshard(False), "reshard": units[0].reshard}[use]()
            has_settled.set()

        works = [lambda: tree.join_pass(call), has_joined.set, lambda: may_end.wait(60)]
        threads = [threading.Thread(target=in_backward, args=works), threading.Thread(target=settle)]
        threads[0].start()
        assert has_joined.wait(60)
        threads[1].start()
        assert not has_settled.wait(0.1)
        may_end.set()
        for thread in threads:
            thread.join(60)
        assert has_settled.is_set()

    def test_does_nothing_inside_the_backward(self, tree, call, units):
        in_backward(lambda: tree.join_pass(call), tree.prepare, units[0].reshard)

    def test_a_backward_waits_while_the_last_one_frees_the_units(self, tree, call, units, slots, monkeypatch):
        """As with a backward in the forward of each replica: what it has gathered would be freed."""
        is_ending, stays_full = threading.Event(), []
        drop = units[0].pieces.drop

        def drop_when_another_may_have_begun() -> None:
            is_ending.set()
            other.join(0.3)
            drop()

        def begin() -> None:
            tree.join_pass(call)
            units[-1].slot_units[0].make_full(call.ready)
            ending.join(60)
            stays_full.append(units[-1].slot_units[0].is_full)

        def begin_later() -> None:
            assert is_ending.wait(60)
            monkeypatch.undo()
            in_backward(begin)

        monkeypatch.setattr(units[0].pieces, "drop", drop_when_another_may_have_begun)
        ending = threading.Thread(target=in_backward, args=[lambda: tree.join_pass(call)])
        other = threading.Thread(target=begin_later)
        for thread in (other, ending):
            thread.start()
        for thread in (other, ending):
            thread.join(60)
        assert stays_full == [True]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_backward_whose_gradients_were_dropped_with_it_raises(self, tree, call):
        def other() -> None:
            in_backward(lambda: tree.join_pass(call), lambda: {}["fails"])

        def fail_elsewhere() -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)

        with pytest.raises(RuntimeError, match="this backward has lost gradients"):
            in_backward(lambda: tree.join_pass(call), fail_elsewhere, lambda: tree.join_pass(call))
        in_backward(lambda: tree.join_pass(call))


@pytest.mark.devices("sim", "stand-in")
class TestOrders:
    """The clocks raise if owners write to shards that are still pulled."""

    def write(self, units: list[Unit]) -> None:
        with torch.no_grad():
            for unit in units:
                for parameter in unit.parameters:
                    parameter.mul_(2)

    def test_owners_write_after_a_call_without_a_backward(self, tree, units, slots):
        for _ in range(2):
            tree.prepare()
            with tree.calling(len(slots)) as call:
                call_units(call, units, slots, lambda unit: None)
            self.write(units)

    def test_owners_write_after_pulls_that_were_in_vain(self, tree, units, slots):
        tree.prepare()
        with tree.calling(len(slots)) as call:
            for slot_unit in units[1].slot_units:
                slot_unit.start(call.ready)
        self.write(units)
