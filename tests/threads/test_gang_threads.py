"""Threads of gangs are kept between calls and hold nothing while idle. Gangs also work if the system has no more."""

import gc
import threading
import time
import weakref

import pytest

from dataparallel.threads import pool
from dataparallel.threads.gang import Gang
from gangs import forget_idle_threads, values, worker_threads

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

TIMEOUT = 20.0  # of every wait that a correct gang ends at once


def test_threads_are_kept_and_never_more_than_the_largest_gang_needs() -> None:
    values([threading.Barrier(8).wait] * 8, 8)  # all at one time: none can do the work of two
    before = worker_threads()
    for call in range(500):
        size = 1 + call % 8
        assert values([int] * size, size) == [0] * size
    assert worker_threads() <= before


def test_a_thread_that_is_slow_to_go_idle_keeps_nothing_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def __call__(self) -> None:
            pass

    work = Gang._work

    def leave_slowly(gang: Gang, slot: int | None, worker: pool.Worker) -> None:
        work(gang, slot, worker)
        time.sleep(0.2)

    task = Task()
    alive = weakref.ref(task)
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(Gang, "_work", leave_slowly)
        Gang([task], 1).run_tasks()
        del task
        assert alive() is None


@pytest.mark.parametrize("possible", [0, 1, 2])
@pytest.mark.parametrize("permits", [1, 2, 4])
def test_too_few_threads_are_an_error_and_no_hang(possible: int, permits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_idle_threads(monkeypatch)
    start, left = pool.Worker.start, [None] * possible

    def start_while_possible(worker: pool.Worker) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(worker)

    together = threading.Barrier(min(permits, 4))
    with monkeypatch.context() as patch:
        patch.setattr(pool.Worker, "start", start_while_possible)
        gang = Gang([lambda: together.wait(TIMEOUT if possible >= permits else 0.1)] * 4, permits)
        if not possible:
            with pytest.raises(RuntimeError, match="new thread"):
                gang.run_tasks()
            return
        outcomes = gang.run_tasks()
    errors = [outcome.error for outcome in outcomes]
    if possible >= permits:
        assert errors == [None] * 4
    else:
        assert any(isinstance(error, RuntimeError) and "new thread" in str(error) for error in errors)
    assert values([int] * 4, permits) == [0] * 4


def test_too_few_threads_for_a_nested_gang_are_an_error_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_idle_threads(monkeypatch)
    start, running = pool.Worker.start, []

    def start_one(worker: pool.Worker) -> None:
        if running:
            raise RuntimeError("can't start new thread")
        running.append(worker)
        start(worker)

    monkeypatch.setattr(pool.Worker, "start", start_one)
    outcome = Gang([lambda: values([int], 1)], 1).run_tasks()[0]
    assert isinstance(outcome.error, RuntimeError)
    assert values([int] * 3, 1) == [0] * 3
