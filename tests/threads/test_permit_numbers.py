"""Which numbers of permits there are, and that a Python without a lock begins with as many as there are cores.

The Python that runs the tests is asked once. Elsewhere only its answer is replaced, so the tests say the same on both.
"""

import os
import sys
import sysconfig
from collections.abc import Mapping

import pytest

from dataparallel.threads import permit_numbers, permits
from dataparallel.threads.permit_numbers import Numbers, has_lock, numbers_for
from dataparallel.threads.permits import PermitChooser

pytestmark = [pytest.mark.devices("cpu"), pytest.mark.usefixtures("two_cores")]

# Seconds of a call with 8 slots on 2 cores, by the number of permits, where Python has no lock.
LAUNCH_BOUND = {1: 20.0, 2: 11.0, 4: 12.0, 8: 13.0}
CONTENDED = {1: 20.0, 2: 25.0, 4: 30.0, 8: 40.0}
SLEEPING = {1: 103.0, 2: 56.0, 4: 28.0, 8: 14.0}
EQUALLY_GOOD = {1: 10.0, 2: 10.1, 4: 10.2, 8: 10.0}


def run(chooser: PermitChooser, cost: Mapping[int, float], calls: int = 60) -> list[int]:
    """Calls with 8 slots: the numbers that they ran with."""
    numbers = []
    for _ in range(calls):
        call = chooser.begin_call("kind", "size", 8)
        numbers.append(call.permits)
        chooser.end_call(call, cost[call.permits])
    return numbers


@pytest.mark.parametrize(
    ("at_once", "ladder"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (32, (1, 2, 4, 8, 16, 32))],
)
def test_which_numbers_there_are_to_choose_from(at_once: int, ladder: tuple) -> None:
    assert numbers_for(at_once) == Numbers(ladder, first=at_once, preferred=1)


@pytest.mark.usefixtures("no_lock")
@pytest.mark.parametrize(("at_once", "first"), [(1, 1), (2, 2), (3, 2), (8, 2)])
def test_without_a_lock_they_are_the_same_and_the_cores_come_first(
    at_once: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = numbers_for(at_once)
    assert (found.first, found.preferred) == (first, first)
    monkeypatch.setattr(permit_numbers, "has_lock", lambda: True)
    assert found.ladder == numbers_for(at_once).ladder


@pytest.mark.parametrize("lock", [True, False])
def test_the_number_of_cores_is_one_of_them(lock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(permit_numbers, "has_lock", lambda: lock)
    found = numbers_for(8)
    assert found.ladder == (1, 2, 4, 6, 8)
    assert found.first == (8 if lock else 6)


def test_the_order_of_the_search_reaches_each_number_once() -> None:
    numbers = Numbers((1, 2, 4, 8), first=4, preferred=4)
    assert numbers.in_order_of_search() == ((4, 2, 1), (8,))


def test_of_equally_good_numbers_the_preferred_one_is_chosen_or_the_nearest() -> None:
    numbers = Numbers((1, 2, 4, 8), first=4, preferred=4)
    assert numbers.choice_among([1, 4, 8]) == 4
    assert numbers.choice_among([1, 2, 8]) == 2
    assert numbers._replace(preferred=1).choice_among([8, 4, 2]) == 2


def test_the_lock_is_that_of_this_python() -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert has_lock()
    else:
        assert has_lock() is sys._is_gil_enabled()  # type: ignore[attr-defined]


def test_a_python_that_cannot_say_has_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    assert has_lock()


@pytest.mark.usefixtures("no_lock")
class TestWithoutALock:
    def test_calls_begin_with_as_many_as_there_are_cores(self) -> None:
        assert run(PermitChooser(), LAUNCH_BOUND, 3) == [2, 2, 2]

    @pytest.mark.parametrize("cost", [LAUNCH_BOUND, CONTENDED, SLEEPING], ids=["launch-bound", "contended", "sleeping"])
    def test_the_best_number_is_chosen_within_thirty_calls(self, cost: dict[int, float]) -> None:
        best = min(cost, key=lambda number: cost[number])
        assert set(run(PermitChooser(), cost)[30:]) == {best}

    def test_of_equally_good_numbers_the_cores_are_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert run(PermitChooser(), EQUALLY_GOOD)[-1] == 2
        monkeypatch.setattr(permit_numbers, "has_lock", lambda: True)
        assert run(PermitChooser(), EQUALLY_GOOD)[-1] == 1, "with a lock the smallest"

    def test_a_hopeless_number_below_keeps_none_above_from_being_tried(self) -> None:
        hopeless_below = {1: 100.0, 2: 20.0, 4: 19.0, 8: 10.0}
        assert set(run(PermitChooser(), hopeless_below)[30:]) == {8}

    def test_a_model_whose_replicas_wait_for_each_other_gets_all_after_two_stalls(self) -> None:
        chooser = PermitChooser()
        first = chooser.begin_call("kind", "size", 8)
        assert (first.permits, first.stall_timeout) == (2, permits.STALL_TIMEOUT)
        chooser.end_call(first, 1.1, stalled=True)
        chooser.end_call(chooser.begin_call("kind", "size", 8), 6.0, stalled=True)
        assert chooser.begin_call("kind", "size", 8).permits == 8
