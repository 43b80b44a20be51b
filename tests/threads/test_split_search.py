"""The best split, from what each slot is expected to take."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataparallel.threads.slot_costs import NEARLY, Cost, fit, predicted, search, within

costs = st.lists(st.builds(Cost, st.floats(0, 5), st.floats(0.1, 5)), min_size=2, max_size=4)


def seconds(costs: list[Cost], sizes: tuple[int, ...] | list[int]) -> list[float]:
    return [cost.of(size) for cost, size in zip(costs, sizes, strict=True)]


@given(costs, st.integers(4, 14), st.integers(1, 4))
def test_no_split_is_much_shorter_than_the_one_that_is_found(costs: list[Cost], total: int, permits: int) -> None:
    start = [total - len(costs) + 1] + [1] * (len(costs) - 1)
    found = search(costs, start, permits)
    every = (s for s in itertools.product(range(1, total), repeat=len(costs)) if sum(s) == total)
    best = min(predicted(seconds(costs, sizes), permits) for sizes in every)
    assert sum(found) == total
    together = permits >= len(costs)
    # With fewer permits than slots it is a problem of scheduling, whose local optimum is enough.
    assert predicted(seconds(costs, found), permits) <= best * (
        1 + 1e-6 if together else 1.5 if permits > 1 else NEARLY
    )


def test_a_slot_three_times_slower_gets_a_third() -> None:
    assert search([Cost(0, 1), Cost(0, 3), Cost(0, 1), Cost(0, 1)], [25] * 4, 4) == [30, 10, 30, 30]


def test_slots_that_are_alike_share_equally_however_many_run_together() -> None:
    for permits in (1, 4):
        assert search([Cost(1, 1)] * 4, [2, 2, 2, 10], permits) == [4, 4, 4, 4]


def test_small_differences_leave_slots_even_where_replicas_wait_for_their_turn() -> None:
    found = search([Cost(0, 1), Cost(0, 3), Cost(0, 1.01), Cost(0, 0.99)], [8] * 4, 1)
    assert found[1] == 1
    assert max(found) - min(found[0], *found[2:]) <= 1


def test_a_slot_gets_no_more_than_fits() -> None:
    assert search([Cost(0, 1)] * 3, [4] * 3, 3, most=[2, 9, 9]) == [2, 5, 5]
    assert search([Cost(0, 1)] * 3, [4] * 3, 3, most=[2, 2, 4]) == [3, 3, 6], "too little room: in the ratio of room"


def test_those_of_a_group_run_one_after_the_other() -> None:
    assert predicted([2, 3, 4], 3, ["a", "a", "b"]) == 5
    assert predicted([2, 3, 4], 2, ["a", "a", "b"]) == 5, "the third starts before the second"
    assert predicted([2, 3, 4], 2) == 6
    assert predicted([2, 3, 4], 1) == 9


def test_fixed_and_proportional_parts_are_told_apart_where_sizes_differ() -> None:
    assert fit([(4, 10.0), (8, 14.0)]) == Cost(pytest.approx(6), pytest.approx(1))  # type: ignore[arg-type]
    assert fit([(8, 16.0), (8, 16.0)]) == Cost(0, 2)
    assert fit([(4, 14.0), (8, 10.0)]).per_sample > 0, "times that fall are noise"


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5), st.data())
def test_what_is_above_the_limit_moves_to_slots_with_room(sizes: list[int], data: st.DataObject) -> None:
    most = data.draw(st.lists(st.integers(1, 40), min_size=len(sizes), max_size=len(sizes)))
    found = within(sizes, most)
    assert sum(found) == sum(sizes)
    assert min(found) >= 1
    if sum(most) >= sum(sizes):
        assert all(size <= limit for size, limit in zip(found, most, strict=True))
