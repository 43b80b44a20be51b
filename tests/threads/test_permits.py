"""How many replicas run Python at a time: the cores on CPU slots, and on accelerators two or all, as devices tell."""

from collections.abc import Mapping
from typing import Any

import pytest

from dataparallel.comm.streams.current import DeviceClock
from dataparallel.threads import permits
from dataparallel.threads.permits import STALL_CALLS, STALL_TIMEOUT, WARM_UP, CallPermits, Permits

pytestmark = [pytest.mark.devices("cpu"), pytest.mark.usefixtures("two_cores")]

LAUNCH_BOUND = {2: 25.0, 8: 35.0}
"""Milliseconds of a call with 8 slots, by the number of replicas at a time."""

WAITING = {2: 56.0, 8: 14.0}

EITHER = [pytest.param(LAUNCH_BOUND, 2, id="launch-bound"), pytest.param(WAITING, 8, id="waiting")]


class Devices(DeviceClock):
    """Eight devices. A mark is their time when they pass it; the host knows of those up to ``passed``."""

    def __init__(self, has_times: bool = True) -> None:
        self.now, self.passed, self.has_times = 0.0, float("inf"), has_times

    def marks(self, streams: Mapping[Any, Any]) -> Any:
        return dict.fromkeys(streams, self.now)

    def have_passed(self, marks: Any) -> bool:
        return all(mark <= self.passed for mark in marks.values())

    def seconds(self, begin: Any, end: Any) -> dict[Any, float]:
        return {device: (end[device] - begin[device]) * self.has_times for device in begin}


class Host:
    """The clock of the host."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(permits, "time", made)
    return made


@pytest.fixture
def devices() -> Devices:
    return Devices()


@pytest.fixture
def rule(host: Host, devices: Devices) -> Permits:
    made = Permits()
    made._clock = devices  # the class takes no clock: every program has the devices'
    return made


STREAMS: dict[Any, Any] = {f"device {number}": None for number in range(8)}


def begin(rule: Permits, training: bool = True, kind: str = "forward", **options: Any) -> CallPermits:
    return rule.begin_call(kind, training, 8, STREAMS, **options)


def calls(rule: Permits, count: int, cost: Mapping[int, float], host: Host | None = None, **options: Any) -> list[int]:
    """The numbers with which so many calls run. ``cost`` is that on the devices, or with ``host`` the host's."""
    numbers = []
    for _ in range(count):
        call = begin(rule, **options)
        numbers.append(call.number)
        if host is None:
            rule._clock.now += cost[call.number]  # type: ignore[attr-defined]
        else:
            host.now += cost[call.number]
        rule.end_call(call)
    return numbers


TRIED = [8] * WARM_UP + [2, 8] * 3


@pytest.mark.parametrize(("cost", "better"), EITHER)
def test_both_numbers_are_tried_three_times_and_the_better_one_stays(
    rule: Permits, cost: dict[int, float], better: int
) -> None:
    assert calls(rule, 60, cost) == TRIED + [better] * (60 - len(TRIED))


def test_no_call_waits_for_devices_that_are_behind(rule: Permits, devices: Devices) -> None:
    """Until they have passed a measured call, the next ones run with all."""
    calls(rule, WARM_UP, WAITING)
    devices.passed = -1.0
    assert calls(rule, 5, LAUNCH_BOUND) == [2, 8, 8, 8, 8]
    assert rule._unread is not None
    devices.passed = float("inf")
    calls(rule, 12, LAUNCH_BOUND)
    assert calls(rule, 1, LAUNCH_BOUND) == [2]


def test_a_kind_says_nothing_about_another_and_a_mode_that_changes_makes_all_be_tried_again(rule: Permits) -> None:
    assert calls(rule, 20, LAUNCH_BOUND)[-1] == 2
    assert calls(rule, 20, WAITING, kind="generate") == TRIED + [8] * 12
    assert calls(rule, 1, LAUNCH_BOUND) == [2]
    assert calls(rule, 20, WAITING, training=False) == TRIED + [8] * 12
    assert calls(rule, 20, LAUNCH_BOUND) == TRIED + [2] * 12


class TestWithoutTimes:
    """Events of the accelerator carry no times: the host's time of calls decides, and in doubt it is the cores."""

    @pytest.fixture
    def devices(self) -> Devices:
        return Devices(has_times=False)

    @pytest.mark.parametrize(("cost", "better"), EITHER)
    def test_the_host_decides(self, rule: Permits, host: Host, cost: dict[int, float], better: int) -> None:
        assert calls(rule, 20, cost, host) == TRIED + [better] * 12


@pytest.mark.parametrize(("cores", "number"), [(1, 1), (2, 2), (6, 6), (64, 8)])
def test_on_cpu_slots_as_many_as_there_are_cores(cores: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "cores", lambda: cores)
    rule = Permits()
    for _ in range(20):
        call = rule.begin_call("forward", True, 8, {})
        assert (call.number, call.before) == (number, None)
        rule.end_call(call)


def test_without_pythons_lock_all(rule: Permits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "has_lock", lambda: False)
    assert calls(rule, 20, LAUNCH_BOUND | WAITING) == [8] * 20


def test_of_compiled_code_the_first_call_of_a_kind_has_one_permit(rule: Permits) -> None:
    assert calls(rule, 10, {1: 9.0} | LAUNCH_BOUND, compiles=True) == [1, *TRIED[1:], 2, 2]


class TestStalls:
    """In a call in which no replica ends for a while, all run: `Gang`. How long that is, and what it teaches."""

    @pytest.mark.parametrize(("shortest", "patience"), [(0.1, STALL_TIMEOUT), (2.0, 2.0 * STALL_CALLS)])
    def test_a_second_or_five_times_the_shortest_call(
        self, rule: Permits, host: Host, shortest: float, patience: float
    ) -> None:
        for seconds in (30.0, shortest):
            call = begin(rule)
            assert call.stall_timeout is None, "all run"
            host.now += seconds
            rule.end_call(call)
        assert begin(rule).stall_timeout == patience

    def test_after_one_replicas_run_together(self, rule: Permits, host: Host) -> None:
        calls(rule, WARM_UP, dict.fromkeys((2, 8), 0.5), host)
        call = begin(rule)
        assert (call.number, call.stall_timeout) == (2, STALL_CALLS * 0.5)
        host.now += 2.6
        rule.end_call(call, stalled=True)
        assert calls(rule, 20, WAITING) == [8] * 20
