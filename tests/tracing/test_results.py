"""Figures of ranges that are made by hand; and intervals, beside the same thing counted tick by tick."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.tracing.intervals import covered, length_of_union, parents, union
from dataparallel.tracing.recorder import Copy
from dataparallel.tracing.results import REST, Results, results, stage_of

pytestmark = pytest.mark.devices("cpu")  # no device takes part

Make = Callable[[], Any]


def found(recorder: Any, milliseconds: float = 100) -> Results:
    return results(recorder, 1e-3 * milliseconds, 0.0, [])


def ms(seconds: float | None) -> float:
    assert seconds is not None
    return pytest.approx(1e3 * seconds)  # type: ignore[return-value]


def test_times_are_exclusive_and_add_up_to_the_block(by_hand: Make) -> None:
    made = (
        by_hand().span("scatter", 0, 5).span("replica", 12, 20, slot=0, call=0).span("parallel_apply", 10, 40)
        .span("reduce_add", 52, 60).span("backward", 50, 80).span("optimizer", 80, 90, call=0)
    )  # fmt: skip
    random.Random(0).shuffle(made.spans)
    result = found(made)
    times = {stage.name: round(1e3 * stage.seconds, 6) for stage in result.stages}
    assert times == {"scatter": 5, "forward": 30, "backward": 22, "sums": 8, "optimizer": 10, REST: 25}
    assert [*times] == ["scatter", "forward", "backward", "sums", "optimizer", REST]
    assert sum(times.values()) == 100
    assert {stage.name: stage.calls for stage in result.stages}["forward"] == 1


def test_other_threads_are_beside_the_caller(by_hand: Make) -> None:
    made = (
        by_hand().span("parallel_apply", 0, 50).span("replica", 1, 30, thread=1, slot=0, call=0)
        .span("unshard", 5, 15, thread=1, slot=0).span("replica", 1, 20, thread=2, slot=1, call=0)
    )  # fmt: skip
    stages = {stage.name: stage for stage in found(made, 60).stages}
    assert ms(stages["forward"].seconds) == 50
    assert ms(stages["forward"].elsewhere) == 19 + 19
    assert ms(stages["unshard"].elsewhere) == 10
    assert stages["unshard"].calls == 0
    assert ms(stages[REST].seconds) == 10


def test_what_the_caller_ran_and_how_long_it_had_no_core(by_hand: Make) -> None:
    made = by_hand().span("gather", 2, 6, ran=1, core=2).span("backward", 0, 20, ran=5, core=6)
    stages = {stage.name: stage for stage in found(made).stages}
    assert ms(stages["backward"].running) == 4
    assert ms(stages["backward"].no_core) == 4
    assert ms(stages["gather"].no_core) == 2
    made = by_hand().span("gather", 2, 6, core=None)
    assert found(made).stages[0].no_core is None


def test_steps_are_those_of_one_optimizer(by_hand: Make) -> None:
    made = by_hand().span("replica", 0, 1, slot=0, call=0).span("replica", 1, 2, slot=0, call=1)
    assert found(made).steps == 2
    for at in (3, 4, 5):
        made.span("backward", at, at + 0.5)
    assert found(made).steps == 3
    for at, optimizer in ((10, 0), (11, 1), (12, 0), (13, 1)):
        made.span("optimizer", at, at + 0.5, call=optimizer)
    assert found(made).steps == 2


def test_slots_and_their_waits(by_hand: Make) -> None:
    made = (
        by_hand().wait(0, 0, 1).wait(1, 0, 21)
        .span("replica", 1, 21, thread=1, slot=0, call=0, ran=12, core=5)
        .span("replica", 21, 31, thread=1, slot=1, call=0, ran=10)
        .span("parallel_apply", 0, 40)
    )  # fmt: skip
    first, second = found(made).slots
    assert (first.slot, first.calls, str(first.device)) == (0, 1, "cpu")
    assert ms(first.forward) == 20
    assert ms(first.running) == 12
    assert ms(first.no_core) == 5
    assert ms(first.no_permit) == 1
    assert first.lock == 0  # no other thread ran in a range
    assert ms(first.work) == 15
    assert ms(second.no_permit) == 21
    assert first.device_forward is None
    assert first.device_backward is None


def test_the_lock_is_waited_for_only_beside_other_threads(by_hand: Make) -> None:
    """For 12 of 20 ms a thread was off a core that it did not wait for; for 5 of them another one was in a range."""
    made = by_hand().span("replica", 0, 20, thread=1, slot=0, call=0, ran=8)
    made.span("replica", 15, 30, thread=2, slot=1, call=0, ran=15).span("parallel_apply", 0, 30)
    first, second = found(made).slots
    assert ms(first.lock) == 5
    assert ms(first.work) == 15
    assert second.lock == 0


def test_a_wait_for_a_permit_inside_of_a_replica_is_no_wait_for_the_lock(by_hand: Make) -> None:
    made = by_hand().wait(0, 5, 11).span("replica", 0, 20, thread=1, slot=0, call=0, ran=8)
    made.span("replica", 0, 30, thread=2, slot=1, call=0)
    assert ms(found(made).slots[0].lock) == 6


def test_imbalance_is_by_call(by_hand: Make) -> None:
    """Another slot is the slow one in each call: over both calls the slots are even."""
    made = by_hand()
    for call, times in enumerate(([10, 30], [30, 10])):
        for slot, time in enumerate(times):
            made.span("replica", 50 * call, 50 * call + time, thread=1 + slot, slot=slot, call=call)
    assert found(made).imbalance == pytest.approx(1.5)
    assert found(by_hand()).imbalance == 1.0
    assert found(by_hand().span("replica", 0, 1, slot=0, call=0)).imbalance == 1.0


def test_bytes_by_stage_and_route(by_hand: Make) -> None:
    made, one, other, third = by_hand(), *(torch.device("meta", index) for index in range(3))
    made.copies += [
        Copy("reduce_add", "chain", 10, one, other, 0),
        Copy("reduce_add", "chain", 30, other, third, 0),
        Copy("", "direct", 1, one, other, 0),
        Copy("scatter", "direct", 5, one, other, 0),
        Copy("scatter", "direct", 5, one, other, 0),
    ]
    sent = found(made).sent
    assert [(s.stage, s.route, s.copies, s.number_of_bytes) for s in sent] == [
        ("scatter", "direct", 2, 10),
        ("sums", "chain", 2, 40),
        (REST, "direct", 1, 1),
    ]
    assert sent[1].busiest == (other, third)


def test_modules_and_forms(by_hand: Make) -> None:
    made = by_hand().span("replicate", 0, 1, detail="DataParallel").span("replicate", 2, 3, detail="replicate")
    for call, module in enumerate(["G", "D", "D"]):
        for slot in range(2):
            made.span("replica", call, call + 0.5, slot=slot, call=call, detail=module)
    result = found(made)
    assert result.modules == {"G": 1, "D": 2}
    assert result.forms == ["DataParallel", "replicate"]
    assert result.stage("replicate").calls == 2
    assert result.stage("sums").seconds == 0.0


def test_ranges_of_other_names_are_stages_of_their_own(by_hand: Make) -> None:
    assert stage_of("replica") == "forward"
    assert stage_of("new") == "new"
    assert stage_of("") == REST
    assert [stage.name for stage in found(by_hand().span("new", 0, 1).span("gather", 2, 3)).stages] == [
        "gather",
        "new",
        REST,
    ]


def test_a_block_without_a_range_is_all_the_users(by_hand: Make) -> None:
    (rest,) = found(by_hand()).stages
    assert (rest.name, ms(rest.seconds)) == (REST, 100)


# ---- intervals -------------------------------------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda at: (at[0], at[0] + at[1])))


def ticks(found: list) -> set[int]:
    return {tick for start, end in found for tick in range(start, end)}


@given(intervals)
def test_a_union_is_the_same_time_in_disjoint_intervals_in_order(found: list) -> None:
    united = union(found)
    assert ticks(united) == ticks(found)
    assert all(end < start for (_, end), (start, _) in pairwise(united))
    assert length_of_union(found) == len(ticks(found))


@given(intervals, st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_what_others_cover_of_an_interval(found: list, interval: tuple[int, int]) -> None:
    start, end = sorted(interval)
    assert covered((start, end), union(found)) == len(ticks(found) & {*range(start, end)})


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int, int | None]]:
    """Ranges as a thread makes them, in the order in which they end: beginning, end, and the number of the parent."""
    found: list[list] = []
    time, around = 0, []
    for begins in draw(st.lists(st.booleans(), max_size=40)):
        time += draw(st.integers(0, 2))
        if begins:
            around.append(len(found))
            found.append([time, None, around[-2] if len(around) > 1 else None])
        elif around:
            found[around.pop()][1] = time
    while around:
        time += draw(st.integers(0, 2))
        found[around.pop()][1] = time
    return [tuple(each) for each in found]  # type: ignore[misc]


@given(nested())
def test_parents_are_those_of_the_calls(made: list[tuple[int, int, int | None]]) -> None:
    """Ranges of no length may lie on the edge of others: those have any parent that touches them."""
    order = sorted(range(len(made)), key=lambda i: (made[i][1], -i))  # as they end, inner ones first
    found = parents([made[i][:2] for i in order])
    for at, i in enumerate(order):
        parent = None if found[at] is None else order[found[at]]
        start, end, expected = made[i]
        if start < end and all(made[j][0] < made[j][1] for j in range(len(made))):
            assert parent == expected
        elif parent is not None:
            assert made[parent][0] <= start <= end <= made[parent][1]


def test_of_two_ranges_at_the_same_time_the_one_that_ends_later_is_outside() -> None:
    assert parents([(2, 5), (2, 5)]) == [1, None]


def test_ranges_that_touch_are_not_inside_of_each_other() -> None:
    assert parents([(0, 2), (2, 4), (0, 4)]) == [2, 2, None]
