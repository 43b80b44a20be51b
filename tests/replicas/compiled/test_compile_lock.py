"""The lock: one thread compiles at a time, and no other thread is in compiled code meanwhile."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dataparallel.replicas.compiled import compile_lock as room
from dataparallel.replicas.compiled.compile_lock import CompileLock, compile_lock
from dataparallel.threads.gang import Gang

pytestmark = pytest.mark.devices("cpu")  # it knows no slots: once is enough

TIMEOUT = 20.0


class Thread(threading.Thread):
    """A thread whose error, if any, is raised by `end`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.join(TIMEOUT)
        assert not self.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error


def wait(event: threading.Event) -> None:
    assert event.wait(TIMEOUT)


def inside(one: CompileLock, left: threading.Event) -> tuple[Thread, threading.Event]:
    """A thread that is inside until ``left`` is set, once it is inside."""
    entered = threading.Event()

    def stay() -> None:
        entered.set()
        wait(left)

    thread = Thread(lambda: one.run_inside(stay))
    wait(entered)
    return thread, entered


def test_who_waits_aside_holds_nobody_up() -> None:
    """A thread waits, in compiled code, for one that compiles."""
    one, compiled = CompileLock(), threading.Event()
    waits = Thread(lambda: one.run_inside(one.run_aside, wait, compiled))
    Thread(lambda: one.run_inside(one.run_alone, compiled.set)).end()
    waits.end()


def test_a_gang_inside_compiled_code_may_compile() -> None:
    """Its tasks compile in other threads, while the thread that waits for them is in compiled code."""
    outcomes = Thread(
        lambda: compile_lock.run_inside(
            Gang([lambda: compile_lock.run_inside(compile_lock.run_alone, lambda: 1)] * 3, 2).run_tasks
        )
    )
    outcomes.end()


def test_a_failure_while_others_wait_lets_them_go_on() -> None:
    one, begun, fail, order = CompileLock(), threading.Event(), threading.Event(), []

    def compile() -> None:
        begun.set()
        wait(fail)
        raise ZeroDivisionError

    compiles = Thread(lambda: one.run_inside(one.run_alone, compile))
    wait(begun)
    waiting = [Thread(lambda: one.run_inside(order.append, "entered")) for _ in range(2)]
    waiting.append(Thread(lambda: one.run_inside(one.run_alone, order.append, "alone")))
    time.sleep(0.02)
    fail.set()
    with pytest.raises(ZeroDivisionError):
        compiles.end()
    for thread in waiting:
        thread.end()
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
    interrupts = Thread(interrupt)
    for _ in range(200):
        try:
            armed.append(True)
            while True:
                one.run_inside(one.run_alone, int)
                one.run_inside(one.run_aside, int)
        except KeyboardInterrupt:
            pass
    stop.set()
    interrupts.end()
    assert not one.is_taken
    Thread(lambda: one.run_inside(one.run_alone, lambda: None)).end()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_child_does_not_wait_for_threads_of_its_parent() -> None:
    left = threading.Event()
    stays, _ = inside(compile_lock, left)
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
    stays.end()
    assert ended == (child, 0)
