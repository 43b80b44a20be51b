"""How many replicas run Python at a time: the cores on CPU slots, and on accelerators two or all, as devices tell."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dataparallel.comm.streams.current import current_streams
from dataparallel.threads import permits
from dataparallel.threads.permits import (
    STALL_CALLS,
    STALL_TIMEOUT,
    WARM_UP,
    CallPermits,
    Permits,
    marks_on,
    seconds_between,
)

pytestmark = [pytest.mark.devices("cpu"), pytest.mark.usefixtures("two_cores")]

LAUNCH_BOUND = {2: 25.0, 8: 35.0}
"""Milliseconds of a call with 8 slots, by the number of replicas at a time."""

WAITING = {2: 56.0, 8: 14.0}

EITHER = [pytest.param(LAUNCH_BOUND, 2, id="launch-bound"), pytest.param(WAITING, 8, id="waiting")]


class Clocks:
    """Those of the host and of eight devices, by which a `Permits` measures the calls that the test makes.

    A mark is the devices' time when they pass it. The host knows of marks up to ``passed``.
    """

    def __init__(self) -> None:
        self.rule, self.host, self.devices = Permits(), 0.0, 0.0
        self.passed, self.have_times = float("inf"), True

    def perf_counter(self) -> float:
        return self.host

    def marks_on(self, streams: Mapping[Any, Any]) -> Any:
        return dict.fromkeys(streams, self.devices)

    def have_passed(self, marks: Any) -> bool:
        return all(mark <= self.passed for mark in marks.values())

    def seconds_between(self, begin: Any, end: Any) -> float:
        return max((end[device] - begin[device]) * self.have_times for device in begin)

    def begin(self, training: bool = True, kind: str = "forward", **options: Any) -> CallPermits:
        return self.rule.begin_call(kind, training, 8, STREAMS, **options)

    def calls(self, count: int, cost: Mapping[int, float], **options: Any) -> list[int]:
        """The numbers with which so many calls run. ``cost`` is that on the devices, else the host's."""
        numbers = []
        for _ in range(count):
            call = self.begin(**options)
            numbers.append(call.number)
            if self.have_times:
                self.devices += cost[call.number]
            else:
                self.host += cost[call.number]
            self.rule.end_call(call)
        return numbers


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(permits, "time", made)
    for name in ("marks_on", "have_passed", "seconds_between"):
        monkeypatch.setattr(permits, name, getattr(made, name))
    return made


STREAMS: dict[Any, Any] = {f"device {number}": None for number in range(8)}

TRIED = [8] * WARM_UP + [2, 8] * 3


@pytest.mark.parametrize(("cost", "better"), EITHER)
def test_both_numbers_are_tried_three_times_and_the_better_one_stays(
    clocks: Clocks, cost: dict[int, float], better: int
) -> None:
    assert clocks.calls(60, cost) == TRIED + [better] * (60 - len(TRIED))


def test_no_call_waits_for_devices_that_are_behind(clocks: Clocks) -> None:
    """Until they have passed a measured call, the next ones run with all."""
    clocks.calls(WARM_UP, WAITING)
    clocks.passed = -1.0
    assert clocks.calls(5, LAUNCH_BOUND) == [2, 8, 8, 8, 8]
    assert clocks.rule._unread is not None
    clocks.passed = float("inf")
    clocks.calls(12, LAUNCH_BOUND)
    assert clocks.calls(1, LAUNCH_BOUND) == [2]


def test_a_kind_says_nothing_about_another_and_a_mode_that_changes_makes_all_be_tried_again(clocks: Clocks) -> None:
    assert clocks.calls(20, LAUNCH_BOUND)[-1] == 2
    assert clocks.calls(20, WAITING, kind="generate") == TRIED + [8] * 12
    assert clocks.calls(1, LAUNCH_BOUND) == [2]
    assert clocks.calls(20, WAITING, training=False) == TRIED + [8] * 12
    assert clocks.calls(20, LAUNCH_BOUND) == TRIED + [2] * 12


@pytest.mark.parametrize(("cost", "better"), EITHER)
def test_where_events_carry_no_times_the_host_decides(clocks: Clocks, cost: dict[int, float], better: int) -> None:
    clocks.have_times = False
    assert clocks.calls(20, cost) == TRIED + [better] * 12


@pytest.mark.devices("sim", "cuda")
def test_the_seconds_between_marks_are_those_of_a_device(slots: list) -> None:
    streams = current_streams(slots)
    before, begin = time.perf_counter(), marks_on(streams)
    for device in streams:
        torch.ones(300, 300, device=device).mm(torch.ones(300, 300, device=device))
    end = marks_on(streams)
    for device in streams:
        torch.accelerator.synchronize(device)
    assert begin.keys() == {*streams}
    assert 0 < seconds_between(begin, end) <= time.perf_counter() - before


def test_a_backend_without_times_has_no_seconds_or_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timeless:
        def seconds_until(self, later: object) -> float:
            raise NotImplementedError("this backend has no times")

    def untimed(*args: object, **options: object) -> None:
        raise RuntimeError("this backend has no timed events")

    mark: Any = {torch.device("meta"): Timeless()}
    assert seconds_between(mark, mark) == 0.0
    monkeypatch.setattr(permits, "Event", untimed)
    assert marks_on({"a device": None}) == {}  # type: ignore[dict-item]


@pytest.mark.parametrize(("cores", "number"), [(1, 1), (2, 2), (6, 6), (64, 8)])
def test_on_cpu_slots_as_many_as_there_are_cores(cores: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "cores", lambda: cores)
    rule = Permits()
    for _ in range(20):
        call = rule.begin_call("forward", True, 8, {})
        assert (call.number, call.before) == (number, None)
        rule.end_call(call)


def test_without_pythons_lock_all(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "has_lock", lambda: False)
    assert clocks.calls(20, LAUNCH_BOUND | WAITING) == [8] * 20


def test_of_compiled_code_the_first_call_of_a_kind_has_one_permit(clocks: Clocks) -> None:
    assert clocks.calls(10, {1: 9.0} | LAUNCH_BOUND, compiles=True) == [1, *TRIED[1:], 2, 2]


class TestStalls:
    """In a call in which no replica ends for a while, all run: `Gang`. How long that is, and what it teaches."""

    @pytest.mark.parametrize(("shortest", "patience"), [(0.1, STALL_TIMEOUT), (2.0, 2.0 * STALL_CALLS)])
    def test_a_second_or_five_times_the_shortest_call(self, clocks: Clocks, shortest: float, patience: float) -> None:
        for seconds in (30.0, shortest):
            call = clocks.begin()
            assert call.stall_timeout is None, "all run"
            clocks.host += seconds
            clocks.rule.end_call(call)
        assert clocks.begin().stall_timeout == patience

    def test_after_one_replicas_run_together(self, clocks: Clocks) -> None:
        clocks.have_times = False
        clocks.calls(WARM_UP, dict.fromkeys((2, 8), 0.5))
        call = clocks.begin()
        assert (call.number, call.stall_timeout) == (2, STALL_CALLS * 0.5)
        clocks.host += 2.6
        clocks.rule.end_call(call, stalled=True)
        assert clocks.calls(20, WAITING) == [8] * 20
