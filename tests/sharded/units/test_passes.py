"""A pass of backward ends once, with or without success, and a slot that waits for others is always woken."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.sharded.units import tree
from dataparallel.sharded.units.sharded_unit import PassGradients
from dataparallel.sharded.units.tree import BackwardPass
from made_units import in_backward


class Ended:
    """Units and the tree in one: keeps what a pass tells them when it ends."""

    gathers = None  # there is one machine

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.error: Exception | None = None
        self.units: list[Any] = []

    def unit(self, name: str) -> Any:
        def end_pass(sums: Any) -> None:
            self.told.append((name, "dropped" if sums is None else "summed"))
            if self.error is not None and sums is not None:
                raise self.error

        def note_lost(computing: Any) -> None:
            self.told.append((name, "lost"))

        gradients = SimpleNamespace(end_pass=end_pass, note_lost=note_lost)
        return SimpleNamespace(gradients=gradients, is_last_backward=True)

    def note_backward_returned(self) -> None:
        self.told.append("returned")

    def finish_sums(self) -> None:
        pass

    def make_owners_wait(self, computing: Any) -> None:
        pass

    def note_pass_end(self, ended: BackwardPass, has_failed: bool) -> None:
        self.told.append("failed" if has_failed else "done")


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def running(ended: Ended, slots: list) -> BackwardPass:
    devices = [torch.device(slot) for slot in slots]
    ended.units = [ended.unit("a"), ended.unit("b")]
    return BackwardPass(cast("Any", ended), devices, current_streams(devices), PassGradients())


DONE = [("a", "summed"), ("b", "summed"), "done"]
FAILED = [("a", "dropped"), ("b", "dropped"), "failed"]


def fail() -> None:
    raise ValueError("in backward")


@contextlib.contextmanager
def joined_elsewhere(running: BackwardPass, *works: Callable[[], Any]) -> Iterator[None]:
    """A backward in another thread has joined. After the block it runs these and ends."""
    has_joined, may_go_on = threading.Event(), threading.Event()

    def other() -> None:
        with contextlib.suppress(ValueError):
            in_backward(running.join, has_joined.set, lambda: may_go_on.wait(60), *works)

    thread = threading.Thread(target=other)
    thread.start()
    assert has_joined.wait(60)
    try:
        yield
    finally:
        may_go_on.set()
        thread.join()


class TestTheEnd:
    def test_comes_after_the_backward_around_a_reentrant_one(self, running, ended):
        def inner() -> None:
            in_backward(running.join)
            assert ended.told == ["returned"]

        in_backward(running.join, inner, lambda: ended.told.append("outer"))
        assert ended.told == ["returned", "outer", *DONE]

    def test_comes_after_all_threads_that_joined(self, running, ended):
        with joined_elsewhere(running):
            in_backward(running.join)
            assert ended.told == ["returned"]
        assert ended.told == ["returned", *DONE]

    @pytest.mark.devices("sim", "stand-in")
    def test_orders_the_streams_of_all_that_joined(self, running, slots, root):
        """A ``backward()`` that has returned before the others gets its gradients when the pass ends."""
        total, early, summing = torch.zeros(2, device=root), torch.Stream(root), torch.Stream(root)

        def add() -> None:
            summing.wait_stream(torch.accelerator.current_stream(root))
            with streams_set({root: summing}):
                total.add_(1)
            running.sums.latest_sum = Event(summing)

        early.wait_stream(torch.accelerator.current_stream(root))
        with joined_elsewhere(running, add), streams_set({root: early}):
            in_backward(running.join)
        with streams_set({root: early}):
            total.mul_(2)  # the clocks see it
        early.synchronize()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_of_a_failed_backward_says_that_one_which_has_returned_lost_gradients(self, running, ended):
        with joined_elsewhere(running, fail):
            in_backward(running.join)
        assert ended.told == ["returned", *FAILED[:-1], ("a", "lost"), ("b", "lost"), "failed"]

    def test_a_backward_past_all_hooks_joins_too(self, running, ended):
        in_backward(*[partial(running.join, only_if_alone=True)] * 2)
        assert ended.told == DONE

    def test_lets_no_more_tasks_join(self, running):
        joined = []
        for _ in range(2):
            in_backward(lambda: joined.append(running.join()))
        assert joined == [True, False]


def waits(running: BackwardPass, slot: int) -> threading.Thread:
    """A thread in which the slot waits for others, and does so already."""
    entered = threading.Event()
    condition = running._changed
    real = condition.wait

    def wait(timeout: float) -> bool:
        entered.set()
        return real(timeout)

    condition.wait = wait
    thread = threading.Thread(target=running.wait_for_others, args=(slot,))
    thread.start()
    assert entered.wait(60)
    return thread


def assert_ends(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


UNITS: list[Any] = ["a", "b", "c", "d"]
"""In the order of their forward, on each slot."""


def delivers(running: BackwardPass, slot: int, units: str, size: int = 2**21) -> None:
    for unit in units:
        running.note_delivery(slot, cast("Any", unit), size)


@pytest.mark.devices("sim", "stand-in")
class TestASlotThatIsAhead:
    @pytest.fixture(autouse=True)
    def order(self, running: BackwardPass, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
        """The last unit's backward has begun on each slot. Whoever is not woken hangs."""
        monkeypatch.setattr(tree, "_PATIENCE", 3600.0)
        order = [UNITS] * 3
        for slot in range(3):
            running.note_unit_begun(slot, 3, order)
        return order

    def test_waits_until_the_others_have_delivered(self, running):
        delivers(running, 0, "d", size=1000)
        running.wait_for_others(0)  # not for a few bytes
        delivers(running, 0, "c")
        running.wait_for_others(1)  # the others do not wait
        thread = waits(running, 0)
        delivers(running, 1, "dc")
        assert thread.is_alive()
        delivers(running, 2, "dc")
        assert_ends(thread)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("has_failed", [False, True])
    def test_is_woken_by_the_end(self, running, has_failed):
        delivers(running, 0, "d")
        thread = waits(running, 0)
        with pytest.raises(ValueError, match="in backward") if has_failed else contextlib.nullcontext():
            in_backward(running.join, fail if has_failed else lambda: None)
        assert_ends(thread)

    def test_that_has_given_up_waits_again_when_the_slot_behind_has_delivered(self, running, monkeypatch):
        monkeypatch.setattr(tree, "_PATIENCE", 0.01)
        delivers(running, 0, "d")
        running.wait_for_others(0)
        monkeypatch.setattr(tree, "_PATIENCE", 3600.0)
        delivers(running, 0, "c")
        delivers(running, 1, "d")
        running.wait_for_others(0)  # slot 2 has not moved
        delivers(running, 2, "d")
        thread = waits(running, 0)
        for slot in (1, 2):
            delivers(running, slot, "c")
        assert_ends(thread)

    def test_does_not_wait_for_branches_that_others_take_in_another_order(self, running, order):
        for slot in (1, 2):
            running.note_unit_begun(slot, 0, order)
            delivers(running, slot, "da")
            running.note_unit_begun(slot, 1, order)
        delivers(running, 0, "dba")
        running.wait_for_others(0)
