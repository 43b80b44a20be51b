"""Gangs: permits, order, groups, nested calls, failures, and tasks that wait for each other."""

import threading
import time
from typing import Any

import pytest

from dataparallel.threads.gang import Gang
from dataparallel.threads.pool import Skipped
from gangs import values, values_of

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

TIMEOUT = 20.0  # of every wait that a correct gang ends at once


def test_without_a_permit_nothing_can_run() -> None:
    with pytest.raises(ValueError, match="at least 1 permit; got 0"):
        Gang([int], 0)


@pytest.mark.parametrize("permits", [2, 3, 8])
def test_as_many_tasks_run_as_there_are_permits(permits: int) -> None:
    together = threading.Barrier(permits)
    values([lambda: together.wait(TIMEOUT)] * (2 * permits), permits)


def tree(depth: int, width: int, permits: int) -> int:
    """A gang of gangs of gangs; regroups how many tasks are at the bottom."""
    if depth == 0:
        return 1
    return sum(values([lambda: tree(depth - 1, width, permits)] * width, permits))


@pytest.mark.parametrize("permits", [1, 2, 4])
@pytest.mark.parametrize(("depth", "width"), [(8, 1), (5, 2), (3, 4)])
def test_nested_gangs_do_not_wait_for_each_other(depth: int, width: int, permits: int) -> None:
    for _ in range(100):
        assert tree(depth, width, permits) == width**depth


def test_a_task_that_waits_for_a_nested_gang_gives_its_permit_back() -> None:
    second_runs = threading.Event()

    def first() -> bool:
        return values([lambda: second_runs.wait(TIMEOUT)], 1)[0]

    assert values([first, second_runs.set], 1) == [True, None]


def test_it_takes_a_permit_again_before_it_goes_on() -> None:
    inside: list[int] = []  # a list can be changed by several threads at once
    most: list[int] = []

    def stay() -> None:
        inside.append(0)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()

    def task() -> None:
        stay()
        values([int], 1)
        stay()

    values([task] * 8, 2)
    assert max(most) <= 2


def test_a_task_that_waits_for_a_nested_gang_keeps_its_group_busy() -> None:
    order: list[str] = []

    def first() -> None:
        values([lambda: time.sleep(0.1)], 1)
        order.append("first goes on")

    values([first, lambda: order.append("second")], 2, ["a", "a"])
    assert order == ["first goes on", "second"]


def fail() -> None:
    raise KeyError("slot")


def test_a_failure_neither_stops_running_tasks_nor_skips_lower_ones() -> None:
    failing, ran = threading.Event(), []

    def running() -> None:
        assert failing.wait(TIMEOUT)
        time.sleep(0.05)

    def fails() -> None:
        failing.set()
        fail()

    # Slot 1 waits for slot 0, and is lower than the one that fails; slot 4 waits for slot 3's.
    tasks = [running, lambda: ran.append(1), fails, running, lambda: ran.append(4)]
    outcomes = Gang(tasks, 5, ["a", "a", "b", "c", "c"]).run_tasks()
    assert ran == [1]
    kinds = [type(outcome.error) for outcome in outcomes]
    assert kinds == [type(None), type(None), KeyError, type(None), Skipped]


# ---- tasks that wait for each other by their own means: after `stall_timeout` all of them run ------------------------


@pytest.mark.parametrize("permits", [1, 3])
def test_tasks_that_wait_for_each_other_end(permits: int) -> None:
    barrier = threading.Barrier(4)
    gang = Gang([lambda: barrier.wait(TIMEOUT)] * 4, permits, stall_timeout=0.2)
    assert sorted(values_of(gang)) == [0, 1, 2, 3]
    assert gang.stalled


@pytest.mark.parametrize(
    ("count", "permits", "seconds", "timeout"),
    [(5, 1, 0.25, 0.8), (2, 2, 0.5, 0.2)],
    ids=["tasks that end one after the other", "long ones for which none waits"],
)
def test_these_are_no_stall(count: int, permits: int, seconds: float, timeout: float) -> None:
    gang = Gang([lambda: time.sleep(seconds)] * count, permits, stall_timeout=timeout)
    values_of(gang)
    assert not gang.stalled


def test_groups_hold_without_permits_too() -> None:
    meet, inside, most = threading.Barrier(2), {"a": 0, "b": 0}, []

    def task(key: str) -> None:
        inside[key] += 1
        most.append(inside[key])
        meet.wait(TIMEOUT)  # one of each
        inside[key] -= 1

    groups = ["a", "a", "b", "b"]
    gang = Gang([lambda key=key: task(key) for key in groups], 1, groups, stall_timeout=0.2)
    values_of(gang)
    assert gang.stalled
    assert most == [1] * 4


def test_a_nested_gang_may_wait_for_another_tasks_one() -> None:
    barrier = threading.Barrier(4)

    def nested() -> list[Any]:
        return values_of(Gang([lambda: barrier.wait(TIMEOUT)] * 2, 1, stall_timeout=0.2))

    found = values_of(Gang([nested] * 2, 1, stall_timeout=0.2))
    assert sorted([*found[0], *found[1]]) == [0, 1, 2, 3]
