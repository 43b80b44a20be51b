"""Tasks of one call in the calling thread. How tasks that meet are handed over to workers is in test_meetings."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from dataparallel.threads.gang import SerialTasks
from dataparallel.threads.pool import Skipped
from gangs import values_of

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

TIMEOUT = 20.0


def test_tasks_run_in_slot_order_in_the_calling_thread() -> None:
    order: list[tuple[int, int]] = []

    def task(slot: int) -> int:
        order.append((slot, threading.get_ident()))
        return 10 * slot

    tasks = [lambda slot=slot: task(slot) for slot in range(4)]
    assert values_of(SerialTasks(tasks)) == [0, 10, 20, 30]
    assert order == [(slot, threading.get_ident()) for slot in range(4)]


def test_without_tasks_nothing_happens() -> None:
    assert SerialTasks([]).run_tasks() == []


def test_after_a_failure_the_rest_is_skipped() -> None:
    def fail() -> None:
        raise ValueError("as asked")

    first, second, third = SerialTasks([int, fail, int]).run_tasks()
    assert (first.value, first.error) == (0, None)
    assert isinstance(second.error, ValueError)
    assert second.error.__traceback__ is not None
    assert second.error.__traceback__.tb_frame.f_code.co_name == "fail"
    assert isinstance(third.error, Skipped)


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
        call = SerialTasks([fail, int], [fail, int])
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
    first, *others = SerialTasks(tasks, tasks).run_tasks()
    assert isinstance(first.error, KeyboardInterrupt)
    assert all(isinstance(outcome.error, Skipped) for outcome in others)
    assert started == [0]
