"""Unions, what they cover, and which interval contains which: beside the same thing counted tick by tick."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.tracing.intervals import covered, length_of_union, parents, union

pytestmark = pytest.mark.devices("cpu")  # no device takes part

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


def test_nothing_has_no_length() -> None:
    assert union([]) == []
    assert length_of_union([]) == 0
    assert covered((0, 1), []) == 0


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
