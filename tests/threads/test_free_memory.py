"""How many samples fit into the memory of the slots' devices."""

import math

import pytest
import torch

from dataparallel.threads import free_memory
from dataparallel.threads.free_memory import samples_that_fit, shares_by_memory

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
    monkeypatch.setattr(free_memory, "free_bytes", free.__getitem__)
    assert shares_by_memory([A, B, C]) == shares


def test_nothing_is_asked_about_host_memory() -> None:
    assert shares_by_memory([torch.device("cpu")] * 2) == (1, 1)
