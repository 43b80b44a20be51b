"""Meetings: order, permits and groups, failures at any place, memory, threads that the system does not have."""

import gc
import random
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import parallel_apply
from dataparallel.threads import pool
from dataparallel.threads.gang import Gang, SerialTasks
from dataparallel.threads.meetings import Meeting, WokenUp, here
from dataparallel.threads.pool import Skipped

pytestmark = pytest.mark.devices("cpu")  # they know no slots: once is enough

WAYS = [{}, {"serial": True}, {"workers": 1}, {"workers": 2}, {"workers": 3}]


class Calls(nn.Module):
    def __init__(self, function: Callable[[int], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, index: int) -> Any:
        return self.function(index)


def call(function: Callable[[int], Any], count: int = 3, **keywords: Any) -> list[Any]:
    modules = [Calls(function) for _ in range(count)]
    return parallel_apply(modules, [(index,) for index in range(count)], devices=["cpu"] * count, **keywords)


def meet(what: str = "all", value: Any = None) -> Any:
    place = here()
    assert place is not None
    return place.meet(what, value, lambda values: [list(values)] * len(values))


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_each_gets_the_values_in_slot_order(way: dict[str, Any]) -> None:
    assert call(lambda index: [meet("first", index), meet("second", -index)], **way) == [[[0, 1, 2], [0, -1, -2]]] * 3


def test_after_forward_a_place_refuses(way: dict[str, Any]) -> None:
    place = call(lambda index: (meet(), here())[1], **way)[1]
    with pytest.raises(
        RuntimeError, match=r"late of replica 1: it(s forward has returned| has to be called by the thread)"
    ):
        place.meet("late", 0, list)


def test_the_original_error_is_raised_also_if_others_translate_theirs(way: dict[str, Any]) -> None:
    def forward(index: int) -> None:
        if index == 2:
            raise KeyError("original")
        try:
            meet()
        except RuntimeError as error:
            raise ValueError("translated") from error

    with pytest.raises(KeyError, match="original"):
        call(forward, **way)


@pytest.mark.parametrize("together", [lambda values: 1 / 0, lambda values: values[:2]], ids=["raises", "too few"])
def test_an_error_in_what_the_last_one_does_is_raised(way: dict[str, Any], together: Callable) -> None:
    with pytest.raises((ZeroDivisionError, RuntimeError), match=r"division by zero|there are 2 results"):
        call(lambda index: here().meet("all", 0, together), **way)
    assert call(lambda index: meet(value=index), **way) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("fault", ["disagree", "fail"])
def test_memory_of_a_failed_call_is_free_without_the_garbage_collector(way: dict[str, Any], fault: str) -> None:
    class Activation:
        pass

    held = []

    def forward(index: int) -> None:
        activation = Activation()
        held.append(weakref.ref(activation))
        if fault == "fail" and index == 2:
            raise ValueError
        meet(f"{fault} {index}" if fault == "disagree" else "all")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises((RuntimeError, ValueError)):
            call(forward, **way)
        deadline = time.monotonic() + 5  # a worker may be about to leave the task
        while any(reference() is not None for reference in held) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reference() for reference in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_replica_for_which_there_is_no_thread_wakes_the_others(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, count = pool.start, 0

    def only_two(job: pool.Job, device: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise RuntimeError("can't start new thread")
        start(job, device)

    before = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(pool, "start", only_two)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            call(lambda index: meet(value=index), **way)
    assert time.monotonic() - before < 60  # the time limit is 600
    assert call(lambda index: meet(value=index), **way) == [[0, 1, 2]] * 3


class Injected(Exception):
    """The error that a test injects."""


def random_call(draw: random.Random) -> None:
    """Replicas that meet some times, on random permits and groups. One of them may do something wrong somewhere."""
    count, rounds = draw.choice([2, 3, 4, 8]), draw.randrange(1, 6)
    permits, serial = draw.randrange(1, count + 1), draw.random() < 0.5
    groups = draw.choice([None, ["a"] * count, [slot % 2 for slot in range(count)]])
    fault = draw.choice([None, "raises", "raises together", "returns", "disagrees"])
    at = draw.randrange(count), draw.randrange(rounds)
    order: list[tuple[int, int]] = []

    def forward(index: int) -> None:
        for number in range(rounds):
            order.append((number, index))
            wrong = fault if at == (index, number) else None
            if wrong == "raises":
                raise Injected
            if wrong == "returns":
                return
            place = here()
            assert place is not None
            found = place.meet((number, wrong == "disagrees"), (number, index), partial_sum)
            assert found == number * count

    def partial_sum(values: list[Any]) -> list[int]:
        number = values[0][0]
        assert values == [(number, slot) for slot in range(count)]
        if fault == "raises together" and number == at[1]:
            raise Injected
        return [number * count] * count

    meeting = Meeting([torch.device("cpu")] * count)
    tasks = [lambda slot=slot: meeting.run_replica(slot, lambda: forward(slot)) for slot in range(count)]
    meeting.scheduler = SerialTasks(tasks, tasks) if serial else Gang(tasks, permits, groups)
    check([type(outcome.error) for outcome in meeting.scheduler.run_tasks()], fault)
    if fault is None and (serial or groups == ["a"] * count):
        assert order == [(number, slot) for number in range(rounds) for slot in range(count)]


def check(kinds: list[type], fault: str | None) -> None:
    if fault is None:
        assert {*kinds} == {type(None)}
    elif fault.startswith("raises"):
        assert kinds.count(Injected) == 1
        assert {*kinds} <= {Injected, WokenUp, Skipped, type(None)}
    else:
        assert kinds.count(RuntimeError) >= 1
        assert {*kinds} <= {RuntimeError, WokenUp, Skipped, type(None)}


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.long)])
def test_random_sequences_with_failures_at_random_places(count: int) -> None:
    draw, interval = random.Random(22), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as many places as possible where another thread can go on
    try:
        for _ in range(count):
            random_call(draw)
    finally:
        sys.setswitchinterval(interval)
