"""Collectives over machines: their results on any stream, and sums that have the same bits wherever numbers lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dataparallel.machines.collectives import stage
from dataparallel.machines.lanes import Lane
from machine_ranks import all_machines, on_machines, summed


def given(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers, or imaginary ones, which torch conjugates when they are read."""
    return (numbers * -1j).conj() if dtype.is_complex else numbers.clone()


def every_collective(rank: int, devices: list[torch.device], dtype: torch.dtype) -> None:
    machines = all_machines()
    lane, device = Lane(machines, "steps"), devices[-1]
    x = torch.arange(4.0, device=device) + rank
    staged = [stage(machines, given(x, dtype), receives) for receives in (None, None, 8, 2)]
    kinds = ("sum", "broadcast", "all_gather", "reduce_scatter")
    calls = [getattr(each, kind) for kind, each in zip(kinds, staged, strict=True)]
    launched = [lane.launch("backward", ["one"], [call], "")[0] for call in calls]
    end = lane.end("backward", [rank == 0, False, rank == 1])
    results = [each.wait() for each in launched]
    assert {result.device for result in results} == {device}
    assert {result.dtype for result in results} == {dtype}
    assert [(result.imag if dtype.is_complex else result).tolist() for result in results] == [
        [1, 3, 5, 7],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 1, 2, 3, 4],
        [[1, 3], [5, 7]][rank],
    ]
    assert end.wait()[0] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_every_collective(dtype: torch.dtype) -> None:
    on_machines(every_collective, dtype)


def other_streams(rank: int, devices: list[torch.device]) -> None:
    """One stream computes, another one takes the result and uses the memory again. The host sends what is ready."""
    machines = all_machines()
    device, marks = devices[1], []
    lane = Lane(machines, "steps")

    def sends(call: Any, link: Any) -> Any:
        transfer = call(link)
        with torch.Stream(device):  # what the host has waited for, any stream may read
            marks[-1] * 1
        return transfer

    for step in range(3):
        side = torch.Stream(device)
        with side:
            flat = torch.ones(4, device=device) * (step + rank)
            marks.append(torch.ones(4, device=device))
            staged = [stage(machines, flat), stage(machines, flat, 8)]
        calls = [partial(sends, staged[0].sum), staged[1].all_gather]
        launched = [lane.launch("backward", ["one"], [call], "")[0] for call in calls]
        total, whole = (each.wait() for each in launched)
        flat.zero_()
        assert total.tolist() == [2.0 * step + 1] * 4
        assert whole.tolist() == [float(step)] * 4 + [step + 1.0] * 4
    torch.accelerator.synchronize(device)


@pytest.mark.devices("sim")
def test_the_stream_that_takes_a_result_comes_after_the_one_that_has_computed() -> None:
    on_machines(other_streams)


# ---- sums in the order of ranks --------------------------------------------------------------------------------------


RANKS = 3


def numbers_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def add(rank: int, devices: list[torch.device]) -> None:
    lane = Lane(all_machines(), "steps")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        for count in (0, 1, 2, 3, 1000, 4097):
            expected = numbers_of(0, count, dtype)
            for other in range(1, RANKS):
                expected += numbers_of(other, count, dtype)
            given = numbers_of(rank, count, dtype).to(devices[0])
            found = summed(lane, given).wait()
            assert found.device == devices[0]
            assert torch.equal(found.cpu(), expected)
            if devices[0].type == "cpu":
                assert torch.equal(given, expected)  # in place
    whole = torch.arange(5) * 10**rank
    assert summed(lane, whole).wait().tolist() == [0, 111, 222, 333, 444]


def test_three_ranks_are_added_in_their_order() -> None:
    on_machines(add, ranks=RANKS)
