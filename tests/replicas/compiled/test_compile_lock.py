"""The lock: one thread compiles at a time, and no other thread is in compiled code meanwhile."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from dataparallel.replicas.compiled import compile_lock as room
from dataparallel.replicas.compiled.compile_lock import CompileLock, compile_lock
from dataparallel.threads.gang import Gang

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough

TIMEOUT = 20.0


def started(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls the function in a thread of its own. If it hangs, the process ends all the same."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def wait(event: threading.Event) -> None:
    assert event.wait(TIMEOUT)


def test_who_waits_aside_holds_nobody_up() -> None:
    """A thread waits, in compiled code, for one that compiles."""
    one, compiled = CompileLock(), threading.Event()
    waits = started(one.run_inside, one.run_aside, wait, compiled)
    started(one.run_inside, one.run_alone, compiled.set).result(TIMEOUT)
    waits.result(TIMEOUT)


def test_a_gang_inside_compiled_code_may_compile() -> None:
    """Its tasks compile in other threads, while the thread that waits for them is in compiled code."""
    gang = Gang([lambda: compile_lock.run_inside(compile_lock.run_alone, lambda: 1)] * 3, 2)
    outcomes = started(compile_lock.run_inside, gang.run_tasks).result(TIMEOUT)
    assert [outcome.value for outcome in outcomes] == [1] * 3


def test_a_failure_while_others_wait_lets_them_go_on() -> None:
    one, begun, fail, order = CompileLock(), threading.Event(), threading.Event(), []

    def compile() -> None:
        begun.set()
        wait(fail)
        raise ZeroDivisionError

    compiles = started(one.run_inside, one.run_alone, compile)
    wait(begun)
    waiting = [started(one.run_inside, order.append, "entered") for _ in range(2)]
    waiting.append(started(one.run_inside, one.run_alone, order.append, "alone"))
    time.sleep(0.02)
    fail.set()
    with pytest.raises(ZeroDivisionError):
        compiles.result(TIMEOUT)
    for each in waiting:
        each.result(TIMEOUT)
    assert sorted(order) == ["alone", "entered", "entered"]


def test_ctrl_c_at_any_moment_leaves_it_open(ctrl_c: None) -> None:
    """Python may raise it after any step of the lock's own code, which is what this thread does most of the time."""
    one, stop, armed = CompileLock(), threading.Event(), []

    def raise_once(*_: Any) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def interrupt() -> None:
        while not stop.is_set():
            time.sleep(0.0007)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    signal.signal(signal.SIGINT, raise_once)  # the fixture puts the former one back
    interrupts = started(interrupt)
    for _ in range(200):
        try:
            armed.append(True)
            while True:
                one.run_inside(one.run_alone, int)
                one.run_inside(one.run_aside, int)
        except KeyboardInterrupt:
            pass
    stop.set()
    interrupts.result(TIMEOUT)
    assert not one.is_taken
    started(one.run_inside, one.run_alone, int).result(TIMEOUT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_child_does_not_wait_for_threads_of_its_parent() -> None:
    entered, left = threading.Event(), threading.Event()
    stays = started(compile_lock.run_inside, lambda: (entered.set(), wait(left)))
    wait(entered)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if room.compile_lock.run_alone(lambda: 3) == 3 else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + TIMEOUT
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    left.set()
    stays.result(TIMEOUT)
    assert ended == (child, 0)
