"""What a recorder takes down of a process, and what it leaves alone."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel, profiling
from dataparallel.tracing.recorder import ENGINE, Recorder, ThreadClocks, start, stop

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


def test_one_recorder_at_a_time(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match=r"a trace runs in this process already.*end its block"):
        start(Recorder())
    assert profiling.recorder is recorder
    stop(Recorder())  # another one
    assert profiling.recorder is recorder


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
