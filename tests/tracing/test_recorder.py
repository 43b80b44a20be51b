"""What a recorder takes down of a process, what it leaves alone, and the clocks of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel, profiling
from dataparallel.tracing.recorder import ENGINE, Recorder, ThreadClocks

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Net(nn.Module):
    """Slot by slot slower, and it says in which thread it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ran: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(threading.get_ident())
        time.sleep(0.002 * len(x))
        return self.linear(x)


def names(recorder: Recorder) -> list[str]:
    return [span.name for span in sorted(recorder.spans, key=lambda span: (span.start, -span.end))]


def test_the_stages_of_a_call_in_their_order(slots: list, root: torch.device, recorder: Recorder) -> None:
    DataParallel(Net().to(root), slots, serial=True)(torch.ones(6, 4, device=root))
    assert names(recorder) == ["scatter", "replicate", "parallel_apply", "replica", "replica", "replica", "gather"]
    assert {span.thread for span in recorder.spans} == {recorder.caller}
    replicas = [span for span in recorder.spans if span.name == "replica"]
    assert [(span.slot, span.detail, span.call) for span in replicas] == [(slot, "Net", 0) for slot in range(3)]
    assert [*recorder.devices.items()] == [(slot, torch.device(device)) for slot, device in enumerate(slots)]
    for span in recorder.spans:
        assert span.start <= span.end
        assert 0 <= span.ran <= 1.5 * (span.end - span.start) + 1e6


def test_replicas_in_workers_are_in_their_threads(slots: list, root: torch.device, recorder: Recorder) -> None:
    DataParallel(Net().to(root), slots, workers=3)(torch.ones(6, 4, device=root))
    (around,) = (span for span in recorder.spans if span.name == "parallel_apply")
    replicas = [span for span in recorder.spans if span.name == "replica"]
    assert len({span.thread for span in replicas}) == 3
    assert all(around.start <= span.start and span.end <= around.end for span in replicas)
    assert {span.thread for span in recorder.spans if span.name != "replica"} == {recorder.caller}


def test_sums_and_gradients_of_a_backward(slots: list, root: torch.device, recorder: Recorder) -> None:
    out = DataParallel(Net().to(root), slots, workers=3)(torch.ones(6, 4, device=root))
    with recorder.backward():
        out.sum().backward()
    (backward,) = (span for span in recorder.spans if span.name == "backward")
    (sums,) = (span for span in recorder.spans if span.name == "reduce_add")
    assert backward.start <= sums.start <= sums.end <= backward.end
    assert sorted(mark.slot for mark in recorder.marks) == [0, 1, 2]
    if root.type != "cpu":
        assert sums.thread.name == ENGINE
        assert len({mark.thread for mark in recorder.marks}) == 3


@pytest.mark.devices("sim", "cuda")
def test_a_thread_of_the_engine_is_called_so_where_python_has_an_object_for_it(
    slots: list, root: torch.device, recorder: Recorder
) -> None:
    for slot in slots:
        x = torch.ones(2, device=slot, requires_grad=True)
        x.register_hook(lambda grad: threading.current_thread() and None)
        x.sum().backward()
    DataParallel(Net().to(root), slots)(torch.ones(6, 4, device=root)).sum().backward()
    assert {span.thread.name for span in recorder.spans if span.name == "reduce_add"} == {ENGINE}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_replica_without_a_permit_waits_until_it_has_one(
    workers: int, slots: list, root: torch.device, recorder: Recorder
) -> None:
    """The wait ends when a replica before it has ended, up to the handover."""
    DataParallel(Net().to(root), slots, workers=workers)(torch.ones(6, 4, device=root))
    replicas = {span.slot: span for span in recorder.spans if span.name == "replica"}
    waits = {wait.slot: wait for wait in recorder.waits}
    assert sorted(waits) == [0, 1, 2]
    for slot, wait in waits.items():
        assert wait.end <= replicas[slot].start
        if slot >= workers:
            assert wait.end >= min(replicas[other].end for other in range(slot))
            assert wait.end - wait.start >= 3e6


class Calling(nn.Module):
    """Calls another wrapper inside of its forward."""

    def __init__(self, inner: DataParallel) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](x)


def test_after_a_nested_call_a_replica_waits_for_its_permit_again(recorder: Recorder) -> None:
    inner = DataParallel(Net(), ["cpu", "cpu"], workers=2)
    DataParallel(Calling(inner), ["cpu"] * 3, workers=2)(torch.ones(6, 4))
    outer = [wait.slot for wait in recorder.waits if wait.call == 0]
    assert sorted(outer) == [0, 0, 1, 1, 2, 2]


def test_a_range_that_fails_is_recorded(slots: list, root: torch.device, recorder: Recorder) -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        DataParallel(Failing().to(root), slots, serial=True)(torch.ones(6, 4, device=root))
    assert names(recorder) == ["scatter", "replicate", "parallel_apply", "replica"]


def test_copies_know_the_range_that_they_belong_to(slots: list, root: torch.device, recorder: Recorder) -> None:
    out = DataParallel(Net().to(root), slots)(torch.ones(6, 4, device=root))
    with recorder.backward():
        out.sum().backward()
    expected = set() if root.type == "cpu" else {"scatter", "replicate", "gather", "backward", "reduce_add"}
    assert {copy.stage for copy in recorder.copies} == expected
    assert all(copy.source != copy.target for copy in recorder.copies)


def test_a_copy_outside_of_all_ranges_has_no_stage(recorder: Recorder) -> None:
    recorder.sent("direct", 5, torch.device("cpu"), torch.device("meta"))
    assert [(copy.stage, copy.number_of_bytes) for copy in recorder.copies] == [("", 5)]


def test_an_optimizer_that_fails_has_no_range(recorder: Recorder) -> None:
    one, other = object(), object()
    recorder.optimizer_begins(one)
    recorder.optimizer_begins(other)
    recorder.optimizer_ends(other)
    recorder.optimizer_begins(one)
    recorder.optimizer_ends(one)
    recorder.optimizer_ends(one)  # it began before the block
    assert [span.call for span in recorder.spans] == [1, 0]


def test_without_a_recorder_no_range_is_made(slots: list, root: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Recorder, "stage", lambda *args: made.append(args))
    monkeypatch.setattr(Recorder, "replicas", lambda *args: made.append(args))
    DataParallel(Net().to(root), slots)(torch.ones(6, 4, device=root)).sum().backward()
    assert made == []
    assert profiling.stage("scatter") is profiling.stage("gather")
    assert profiling.replicas("Net", []) is None


@pytest.mark.devices("cpu")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_records_nothing(recorder: Recorder) -> None:
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        ok = profiling.recorder is None
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert profiling.recorder is recorder


def test_short_ranges_of_one_slot_do_not_ask_for_cores(recorder: Recorder) -> None:
    """A step of ``fully_shard`` has hundreds of them."""
    with recorder.stage("reduce_add"), recorder.stage("unshard", slot=1):
        pass
    inner, outer = recorder.spans
    assert inner.core is None
    assert (outer.core is None) == (ThreadClocks().waited_for_core() is None)


# ---- the clocks of a thread: what it ran, and how long it had no core ------------------------------------------------

host_only = pytest.mark.devices("cpu")
has_schedstat = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this system does not tell how long threads have no core"
)


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@host_only
def test_a_thread_runs_while_it_computes_and_not_while_it_sleeps() -> None:
    clocks = ThreadClocks()
    before = clocks.ran()
    time.sleep(0.05)
    asleep = clocks.ran() - before
    busy(0.05)
    assert asleep < 0.02e9
    assert clocks.ran() - before - asleep >= 0.05e9


@host_only
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


@host_only
@has_schedstat
def test_sleep_is_no_wait_for_a_core() -> None:
    clocks = ThreadClocks()
    before = clocks.waited_for_core()
    time.sleep(0.3)
    after = clocks.waited_for_core()
    assert before is not None
    assert after is not None
    assert after - before < 0.25e9


@host_only
@pytest.mark.parametrize("content", [None, "", "nonsense", "1 x 2"])
def test_a_system_that_does_not_tell(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_text(content)
    clocks = ThreadClocks(str(path))
    assert clocks.waited_for_core() is None
    assert clocks.ran() > 0


@host_only
def test_the_second_number_is_read(tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    path.write_text("5 17 3\n")
    assert ThreadClocks(str(path)).waited_for_core() == 17


@host_only
@has_schedstat
@pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no lock to keep")
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
