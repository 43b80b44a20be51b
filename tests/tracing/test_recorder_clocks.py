"""The clocks of a thread: what it ran, and how long it had no core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dataparallel.tracing.recorder import ThreadClocks

pytestmark = pytest.mark.devices("cpu")  # no device takes part

has_schedstat = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this system does not tell how long threads have no core"
)


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_thread_runs_while_it_computes_and_not_while_it_sleeps() -> None:
    clocks = ThreadClocks()
    before = clocks.ran()
    time.sleep(0.05)
    asleep = clocks.ran() - before
    busy(0.05)
    assert asleep < 0.02e9
    assert clocks.ran() - before - asleep >= 0.05e9


@has_schedstat
def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    here = os.sched_getaffinity(0)
    core = min(here)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(other.pid, {core})
        os.sched_setaffinity(0, {core})  # of this thread
        clocks, begin = ThreadClocks(), time.perf_counter_ns()
        before, ran = clocks.waited_for_core(), clocks.ran()
        assert before is not None
        busy(0.1)
        after, wall = clocks.waited_for_core(), time.perf_counter_ns() - begin
        assert after is not None
        assert after - before == pytest.approx(wall - (clocks.ran() - ran), abs=0.02e9)
        assert after > before
    finally:
        os.sched_setaffinity(0, here)
        other.kill()
        other.wait()


@has_schedstat
def test_sleep_is_no_wait_for_a_core() -> None:
    clocks = ThreadClocks()
    before = clocks.waited_for_core()
    time.sleep(0.3)
    after = clocks.waited_for_core()
    assert before is not None
    assert after is not None
    assert after - before < 0.25e9


@pytest.mark.parametrize("content", [None, "", "nonsense", "1 x 2"])
def test_a_system_that_does_not_tell(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_text(content)
    clocks = ThreadClocks(str(path))
    assert clocks.waited_for_core() is None
    assert clocks.ran() > 0


def test_the_second_number_is_read(tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    path.write_text("5 17 3\n")
    assert ThreadClocks(str(path)).waited_for_core() == 17


@has_schedstat
def test_to_read_keeps_the_lock() -> None:
    """Another thread that wants Python's lock gets it only after its switch interval, not at each read."""
    clocks = ThreadClocks()
    before, turns, stop = sys.getswitchinterval(), 0, threading.Event()

    def wants_the_lock() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)  # gives it away and wants it again

    sys.setswitchinterval(10)
    thread = threading.Thread(target=wants_the_lock)
    try:
        thread.start()
        while turns == 0:
            time.sleep(0.001)
        seen = turns
        for _ in range(2000):
            clocks.waited_for_core()
        assert turns == seen
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()
