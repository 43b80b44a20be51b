"""Sums over machines: the same numbers give the same bits, wherever they lie in a tensor."""

import pytest
import torch

from machine_ranks import all_machines, on_machines, summed

RANKS = 3


def numbers_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def add(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for count in (0, 1, 2, 3, 1000, 4097):
            expected = numbers_of(0, count, dtype)
            for other in range(1, RANKS):
                expected += numbers_of(other, count, dtype)
            given = numbers_of(rank, count, dtype).to(devices[0])
            found = summed(machines, given).wait()
            assert found.device == devices[0]
            assert torch.equal(found.cpu(), expected)
            if devices[0].type == "cpu":
                assert torch.equal(given, expected)  # in place
    whole = torch.arange(5) * 10**rank
    assert summed(machines, whole).wait().tolist() == [0, 111, 222, 333, 444]


def test_three_ranks_are_added_in_their_order() -> None:
    on_machines(add, ranks=RANKS)


def add_parts(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    given = numbers_of(rank, 4097, torch.float32).to(devices[0])
    whole = summed(machines, given.clone()).wait()
    parts = [summed(machines, part.clone()).wait() for part in given.split([1, 96, 1000, 3000])]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_have_the_bits_of_the_whole(ranks: int) -> None:
    """So buckets may be of any size."""
    on_machines(add_parts, ranks=ranks)
