"""Meetings: order, permits and groups, failures at any place, memory, threads that the system does not have."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from dataparallel import parallel_apply
from dataparallel.threads import pool
from dataparallel.threads.meetings import here

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


def test_after_forward_a_place_refuses(way: dict[str, Any]) -> None:
    place = call(lambda index: (meet(), here())[1], **way)[1]
    with pytest.raises(
        RuntimeError, match=r"late of replica 1: it(s forward has returned| has to be called by the thread)"
    ):
        place.meet("late", 0, list)


@pytest.mark.parametrize("together", [lambda values: 1 / 0, lambda values: values[:2]], ids=["raises", "too few"])
def test_an_error_in_what_the_last_one_does_is_raised(way: dict[str, Any], together: Callable) -> None:
    with pytest.raises((ZeroDivisionError, RuntimeError), match=r"division by zero|there are 2 results"):
        call(lambda index: here().meet("all", 0, together), **way)
    assert call(lambda index: meet(value=index), **way) == [[0, 1, 2]] * 3


@pytest.mark.usefixtures("no_collector")
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

    with pytest.raises((RuntimeError, ValueError)):
        call(forward, **way)
    deadline = time.monotonic() + 5  # a worker may be about to leave the task
    while any(reference() is not None for reference in held) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [reference() for reference in held] == [None] * len(held)


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
