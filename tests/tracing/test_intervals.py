"""Intervals of time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.tracing.rows import length_of_union, union, without

pytestmark = pytest.mark.devices("cpu")

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))))


@given(intervals)
def test_a_union_is_the_same_time_in_disjoint_intervals(given: list) -> None:
    found = union(given)
    assert {at for a, b in found for at in range(a, b)} == {at for a, b in given for at in range(a, b)}
    assert all(one[1] < other[0] for one, other in pairwise(found))
    assert length_of_union(given) == len({at for a, b in given for at in range(a, b)})


@given(intervals)
def test_what_is_left_and_what_was_taken_are_the_whole(given: list) -> None:
    left = [*without((0, 30), given)]
    assert length_of_union(left) + length_of_union(given) == 30
    assert length_of_union([*left, *given]) == 30
