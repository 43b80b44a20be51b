"""Tasks of one call in the calling thread. Tasks that wait for each other are handed over to workers."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dataparallel.threads import in_turn, pool
from dataparallel.threads.gang import Gang
from dataparallel.threads.in_turn import SerialTasks
from dataparallel.threads.pool import Outcome, Skipped
from gangs import values_of

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

TIMEOUT = 20.0


def waits_for_others(count: int) -> list[Callable[[], int]]:
    barrier = threading.Barrier(count)
    return [lambda: barrier.wait(TIMEOUT)] * count


def test_tasks_run_in_slot_order_in_the_calling_thread() -> None:
    order: list[tuple[int, int]] = []

    def task(slot: int) -> int:
        order.append((slot, threading.get_ident()))
        return 10 * slot

    tasks = [lambda slot=slot: task(slot) for slot in range(4)]
    for call in (SerialTasks(tasks), SerialTasks(tasks, tasks, stall_timeout=5.0)):
        order.clear()
        assert values_of(call) == [0, 10, 20, 30]
        assert order == [(slot, threading.get_ident()) for slot in range(4)]
        assert not call.stalled


def test_without_tasks_nothing_happens() -> None:
    assert SerialTasks([]).run_tasks() == []
    assert SerialTasks([], [], stall_timeout=1.0).run_tasks() == []


def test_after_a_failure_the_rest_is_skipped() -> None:
    def fail() -> None:
        raise ValueError("as asked")

    first, second, third = SerialTasks([int, fail, int]).run_tasks()
    assert (first.value, first.error) == (0, None)
    assert isinstance(second.error, ValueError)
    assert second.error.__traceback__ is not None
    assert second.error.__traceback__.tb_frame.f_code.co_name == "fail"
    assert isinstance(third.error, Skipped)


def test_tasks_that_wait_for_each_other_end() -> None:
    here = threading.get_ident()
    threads: list[int] = []
    tasks = [lambda task=task: (threads.append(threading.get_ident()), task())[1] for task in waits_for_others(4)]
    call = SerialTasks(tasks, tasks, stall_timeout=0.2)
    assert sorted(values_of(call)) == [0, 1, 2, 3]
    assert call.stalled
    assert threads.count(here) == 1
    assert len({*threads}) == 4


def test_the_tasks_for_workers_are_handed_over() -> None:
    barrier = threading.Barrier(3)

    def task(where: str) -> str:
        barrier.wait(TIMEOUT)
        return where

    call = SerialTasks([lambda: task("here")] * 3, [lambda: task("in a worker")] * 3, stall_timeout=0.2)
    assert values_of(call) == ["here", "in a worker", "in a worker"]


def test_tasks_that_end_one_after_the_other_are_no_stall() -> None:
    tasks = [lambda: time.sleep(0.25)] * 5
    call = SerialTasks(tasks, tasks, stall_timeout=0.8)
    values_of(call)
    assert not call.stalled


def test_nor_is_a_long_last_task() -> None:
    tasks = [int, lambda: time.sleep(0.6)]
    call = SerialTasks(tasks, tasks, stall_timeout=0.2)
    values_of(call)
    assert not call.stalled


def test_a_task_that_fails_after_a_stall_is_reported() -> None:
    entered = threading.Event()

    def waits() -> None:
        assert entered.wait(TIMEOUT)

    def fails() -> None:
        entered.set()
        raise ValueError("as asked")

    first, second = SerialTasks([waits, fails], [waits, fails], stall_timeout=0.2).run_tasks()
    assert first.error is None
    assert isinstance(second.error, ValueError)


def test_a_task_that_fails_here_waits_for_those_in_workers() -> None:
    barrier, ended = threading.Barrier(2), []

    def fails() -> None:
        barrier.wait(TIMEOUT)
        raise ValueError("as asked")

    def goes_on() -> None:
        barrier.wait(TIMEOUT)
        time.sleep(0.3)
        ended.append(True)

    first, second = SerialTasks([fails, goes_on], [fails, goes_on], stall_timeout=0.2).run_tasks()
    assert isinstance(first.error, ValueError)
    assert second.error is None
    assert ended == [True]


def test_too_few_threads_are_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_threads(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    go_on = threading.Event()
    threading.Timer(0.6, go_on.set).start()
    tasks = [lambda: go_on.wait(TIMEOUT)] * 3
    monkeypatch.setattr(pool, "start", no_threads)
    first, *others = SerialTasks(tasks, tasks, stall_timeout=0.2).run_tasks()
    assert first.value is True
    assert [str(outcome.error) for outcome in others] == ["can't start new thread"] * 2


def test_the_first_poll_only_notes_what_is_left() -> None:
    call = SerialTasks([int] * 2, [int] * 2, stall_timeout=pool.POLL_SECONDS)
    call.poll()
    assert not call.stalled
    call.poll()
    assert call.stalled
    assert values_of(call) == [0, 0]


def test_a_task_may_end_while_the_others_are_being_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, handing_over = Gang.begin_tasks, threading.Event()

    def begin_slowly(rest: Gang) -> None:
        handing_over.set()
        time.sleep(0.3)
        begin(rest)

    monkeypatch.setattr(Gang, "begin_tasks", begin_slowly)
    tasks = [lambda: handing_over.wait(TIMEOUT)] * 3
    assert values_of(SerialTasks(tasks, tasks, stall_timeout=0.2)) == [True] * 3


def test_nested_calls_may_wait_for_each_other() -> None:
    tasks = waits_for_others(4)

    def nested() -> list[Any]:
        return values_of(SerialTasks(tasks[:2], tasks[:2], stall_timeout=0.2))

    found = values_of(SerialTasks([nested] * 2, [nested] * 2, stall_timeout=0.2))
    assert sorted([*found[0], *found[1]]) == [0, 1, 2, 3]


def test_calls_of_many_threads_whose_timeout_ends_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(in_turn, "_watcher", in_turn._Watcher())
    calls: list[SerialTasks] = []

    def several() -> None:
        for _ in range(60):
            tasks = [lambda: time.sleep(0.002)] * 3
            calls.append(SerialTasks(tasks, tasks, stall_timeout=0.001))
            values_of(calls[-1])

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(calls) == 240
    assert any(call.stalled for call in calls)


def test_the_watcher_sleeps_and_wakes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def watchers() -> int:
        return sum(thread.name == "dataparallel-watch" for thread in threading.enumerate())

    before, watcher = watchers(), in_turn._Watcher()
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(in_turn, "_watcher", watcher)
    for _ in range(3):
        tasks = waits_for_others(3)
        assert SerialTasks(tasks, tasks, stall_timeout=0.02).run_tasks()
        deadline = time.monotonic() + TIMEOUT
        while not watcher._is_asleep:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert watchers() == before + 1


def test_a_call_that_is_over_is_not_kept() -> None:
    class Activation:
        pass

    held: list[weakref.ref] = []

    def fail() -> None:
        activation = Activation()
        held.append(weakref.ref(activation))
        raise ValueError("as asked")

    gc.collect()
    gc.disable()
    try:
        call = SerialTasks([fail, int], [fail, int], stall_timeout=5.0)
        outcomes = call.run_tasks()
        reference = weakref.ref(call)
        assert held[0]() is not None
        for outcome in outcomes:  # as the caller that raises it does
            outcome.error = None
        del outcome, outcomes, call
        assert held[0]() is None
        assert reference() is None
    finally:
        gc.enable()


@pytest.fixture
def press(ctrl_c: None) -> Callable[[], None]:
    main = threading.get_ident()
    return lambda: signal.pthread_kill(main, signal.SIGINT)


needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread on this system")


@needs_signals
def test_ctrl_c_is_raised_where_it_comes_and_nothing_else_starts(press: Callable[[], None]) -> None:
    started: list[int] = []

    def task(slot: int) -> None:
        started.append(slot)
        press()
        while True:
            time.sleep(0.001)

    tasks = [lambda slot=slot: task(slot) for slot in range(3)]
    first, *others = SerialTasks(tasks, tasks, stall_timeout=5.0).run_tasks()
    assert isinstance(first.error, KeyboardInterrupt)
    assert all(isinstance(outcome.error, Skipped) for outcome in others)
    assert started == [0]


class HandedOver:
    """Two tasks that wait for each other, the second of which goes on until it may end."""

    def __init__(self, first_returns: bool) -> None:
        self.both, self.may_end, self.ended = threading.Barrier(2), threading.Event(), threading.Event()
        self.first_returns = first_returns

    def first(self) -> None:
        self.both.wait(TIMEOUT)
        if not self.first_returns:
            time.sleep(TIMEOUT)

    def second(self) -> None:
        self.both.wait(TIMEOUT)
        assert self.may_end.wait(TIMEOUT)
        self.ended.set()

    def run(self, *steps: Callable[[], Any]) -> list[Outcome]:
        """Meanwhile runs the steps one after the other, once both tasks run."""

        def meanwhile() -> None:
            while self.both.n_waiting or not call.stalled:
                time.sleep(0.001)
            for step in steps:
                time.sleep(0.25)  # longer than a waiting thread needs to look up
                step()

        tasks = [self.first, self.second]
        call = SerialTasks(tasks, tasks, stall_timeout=0.2)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        try:
            return call.run_tasks()
        finally:
            thread.join()


@needs_signals
def test_after_ctrl_c_what_was_handed_over_is_waited_for(press: Callable[[], None]) -> None:
    tasks = HandedOver(first_returns=False)
    first, second = tasks.run(press, tasks.may_end.set)
    assert isinstance(first.error, KeyboardInterrupt)
    assert second.error is None
    assert tasks.ended.is_set()


@needs_signals
def test_ctrl_c_while_what_was_handed_over_is_waited_for(press: Callable[[], None]) -> None:
    tasks = HandedOver(first_returns=True)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(press, tasks.may_end.set)
    assert tasks.ended.is_set()


@needs_signals
@pytest.mark.parametrize("first_returns", [False, True], ids=["while the first runs", "while the second runs"])
def test_a_second_ctrl_c_is_raised_at_once(first_returns: bool, press: Callable[[], None]) -> None:
    tasks = HandedOver(first_returns)
    with pytest.raises(KeyboardInterrupt):
        tasks.run(press, press)
    assert not tasks.ended.is_set()
    tasks.may_end.set()
    assert tasks.ended.wait(TIMEOUT)
