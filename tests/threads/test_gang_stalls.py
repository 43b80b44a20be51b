"""Tasks that wait for each other by their own means: after its ``stall_timeout`` a gang lets them all run."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dataparallel.threads import pool
from dataparallel.threads.gang import Gang
from gangs import forget_idle_threads

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

TIMEOUT = 20.0


def run(gang: Gang) -> list[Any]:
    outcomes = gang.run_tasks()
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("permits", [1, 3])
def test_tasks_that_wait_for_each_other_end(permits: int) -> None:
    barrier = threading.Barrier(4)
    gang = Gang([lambda: barrier.wait(TIMEOUT)] * 4, permits, stall_timeout=0.2)
    assert sorted(run(gang)) == [0, 1, 2, 3]
    assert gang.stalled


def test_without_a_timeout_the_limit_stays() -> None:
    barrier = threading.Barrier(2)

    def wait() -> bool:
        try:
            barrier.wait(0.5)
        except threading.BrokenBarrierError:
            return False
        return True

    gang = Gang([wait] * 2, 1)
    assert run(gang) == [False, False]
    assert not gang.stalled


def test_tasks_that_end_one_after_the_other_are_no_stall() -> None:
    gang = Gang([lambda: time.sleep(0.25)] * 5, 1, stall_timeout=0.8)
    run(gang)
    assert not gang.stalled


def test_nor_is_a_long_task_for_which_none_waits() -> None:
    gang = Gang([lambda: time.sleep(0.5)] * 2, 2, stall_timeout=0.2)
    run(gang)
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
    run(gang)
    assert gang.stalled
    assert most == [1] * 4


def test_a_nested_gang_may_wait_for_another_tasks_one() -> None:
    barrier = threading.Barrier(4)

    def nested() -> list[Any]:
        return run(Gang([lambda: barrier.wait(TIMEOUT)] * 2, 1, stall_timeout=0.2))

    found = run(Gang([nested] * 2, 1, stall_timeout=0.2))
    assert sorted([*found[0], *found[1]]) == [0, 1, 2, 3]


def test_workers_that_come_after_the_end_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang([int], 1, stall_timeout=0.2)
    run(gang)
    forget_idle_threads(monkeypatch)
    for number in range(2):
        gang._work(None, pool.Worker(number, None))  # as a worker does that was started for a stall, and is late


def test_a_task_that_fails_after_a_stall_is_reported() -> None:
    entered = threading.Event()

    def waits() -> None:
        assert entered.wait(TIMEOUT)

    def fails() -> None:
        entered.set()
        raise ValueError("as asked")

    gang = Gang([waits, fails], 1, stall_timeout=0.2)
    first, second = gang.run_tasks()
    assert first.error is None
    assert isinstance(second.error, ValueError)


def test_gangs_whose_timeout_ends_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataparallel.threads.pool.POLL_SECONDS", 0.002)
    tasks: list[Callable[[], None]] = [lambda: time.sleep(0.002)] * 3
    gangs = [Gang(tasks, 1, stall_timeout=0.001) for _ in range(150)]
    for gang in gangs:
        run(gang)
    assert any(gang.stalled for gang in gangs)
