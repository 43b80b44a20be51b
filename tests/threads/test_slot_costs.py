"""What slots take: time that counts, memory, and the best split of a batch that follows."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dataparallel.threads import slot_costs
from dataparallel.threads.slot_costs import (
    NEARLY,
    Cost,
    SlotTimes,
    fit,
    free_bytes,
    predicted,
    samples_that_fit,
    search,
    shares_by_memory,
    waiting,
    within,
)
from spare_streams import spare_stream

pytestmark = pytest.mark.devices("cpu")  # most of them know no device


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test moves on."""
    now = [0.0]
    monkeypatch.setattr(slot_costs.time, "perf_counter", lambda: now[0])
    return now


def test_time_asleep_counts_and_time_waiting_for_other_replicas_does_not(clock: list[float], slots: list) -> None:
    def sleeps() -> None:
        clock[0] += 3

    def waits() -> str:
        clock[0] += 1
        with waiting():
            clock[0] += 5
        return "done"

    times = SlotTimes([torch.device(slot) for slot in slots[:2]])
    times.begin_call([], [])
    times.run_replica(0, sleeps)
    assert times.run_replica(1, waits) == "done"
    assert times.seconds == {0: 3, 1: 1}
    times.end_call()
    assert times.span == 9


def test_a_replica_inside_a_replica_keeps_its_waiting_to_itself(clock: list[float]) -> None:
    outer, inner = SlotTimes([torch.device("cpu")]), SlotTimes([torch.device("cpu")])

    def waits() -> None:
        with waiting():
            clock[0] += 5

    outer.run_replica(0, lambda: inner.run_replica(0, waits))
    assert inner.seconds == {0: 0}
    assert outer.seconds == {0: 5}


def test_a_replica_that_fails_has_no_time() -> None:
    times = SlotTimes([torch.device("cpu")])
    with pytest.raises(ZeroDivisionError):
        times.run_replica(0, lambda: 1 // 0)
    assert times.seconds == {}


@pytest.mark.devices("sim", "stand-in")
def test_work_from_before_is_waited_for_and_so_is_that_of_a_replica(root: torch.device) -> None:
    """What the host has waited for, any stream may read."""
    times, before, other = SlotTimes([root]), torch.ones(3, device=root), spare_stream(root)
    times.begin_call([torch.accelerator.current_stream(root)], [])
    with other:
        before * 2
    made = times.run_replica(0, lambda: torch.ones(3, device=root))
    with other:
        made * 2
    other.synchronize()


@pytest.mark.devices("sim")
def test_memory_is_that_of_the_inputs_and_that_which_a_forward_leaves_or_needs_at_its_peak() -> None:
    sim, device = torch.sim, torch.device("sim:1")  # type: ignore[attr-defined]
    inputs = [([torch.zeros(100, device=device), torch.zeros(100)], {})]

    def needs(peak: int) -> Tensor:
        torch.zeros(peak, device=device)
        return torch.zeros(1000, device=device)

    try:
        sim.set_memory_capacity(sim.memory_allocated(1) + (1 << 20), 1)
        assert free_bytes(device) == 1 << 20
        sim.reset_peak_memory_stats(1)
        for peak, taken in ((50_000, 200_000), (10_000, 4000)):  # the second peak is not the highest
            times = SlotTimes([device])
            times.begin_call([], inputs)
            kept = times.run_replica(0, lambda peak=peak: needs(peak))
            times.end_call()
            assert times.taken == {device: taken + 400}
            assert times.free == {device: 1 << 20}
            del kept
    finally:
        sim.set_memory_capacity(None, 1)
    assert free_bytes(device) is None, "no limit is known"


A, B, C = (torch.device("meta", index) for index in range(3))  # nothing is asked of them


def test_a_slot_has_memory_for_as_many_samples_as_three_quarters_of_what_is_free_hold() -> None:
    assert samples_that_fit([A, B], [10, 20], {A: 4000, B: 4000}, {A: 1000, B: 1000}) == (30, 60)


def test_slots_on_one_device_share_its_memory() -> None:
    assert samples_that_fit([A, A, B], [10, 10, 20], {A: 4000, B: 4000}, {A: 1000, B: 1000}) == (30, 30, 60)


def test_nothing_limits_a_slot_whose_device_tells_nothing_or_that_took_nothing() -> None:
    assert samples_that_fit([A, B], [10, 20], {B: 4000}, {B: 0}) == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("free", "shares"),
    [
        ({A: 80, B: 80, C: 80}, (1, 1, 1)),
        ({A: 50, B: 80, C: 80}, (1, 1, 1)),
        ({A: 20, B: 80, C: 80}, (0.5, 1, 1)),
        ({A: 0, B: 80, C: 80}, (1e-3, 1, 1)),
        ({A: None, B: 80, C: 80}, (1, 1, 1)),
        ({A: 0, B: 0, C: 0}, (1, 1, 1)),
    ],
)
def test_the_first_shares_follow_the_free_memory(
    free: dict, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_costs, "free_bytes", free.__getitem__)
    assert shares_by_memory([A, B, C]) == shares


def test_nothing_is_asked_about_host_memory() -> None:
    assert shares_by_memory([torch.device("cpu")] * 2) == (1, 1)


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
