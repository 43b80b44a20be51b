"""The times of slots: what counts and what does not. And how many samples fit into the memory of their devices."""

import math

import pytest
import torch
from torch import Tensor

from dataparallel.threads import slot_costs
from dataparallel.threads.slot_costs import SlotTimes, free_bytes, samples_that_fit, shares_by_memory, waiting
from spare_streams import spare_stream


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
