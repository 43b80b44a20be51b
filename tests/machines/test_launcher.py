"""The launcher issues collectives in one order on all ranks, whatever order they are asked for in."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed

from dataparallel.machines.collectives import all_gather, all_reduce, broadcast, reduce_scatter, stage
from machine_ranks import all_machines, on_machines


def every_collective(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    device = devices[-1]
    round = machines.queue.begin_round("backward", "one of each")
    x = torch.arange(4.0, device=device) + rank
    staged = [stage(machines, x.clone(), receives) for receives in (None, None, 8, 2)]
    launched = [
        round.launch("a sum", lambda: all_reduce(machines, staged[0])),
        round.launch("a broadcast", lambda: broadcast(machines, staged[1])),
        round.launch("a gather", lambda: all_gather(machines, staged[2])),
        round.launch("a sum to all", lambda: reduce_scatter(machines, staged[3])),
    ]
    end = round.end([rank == 0, False, rank == 1])
    results = [each.wait() for each in launched]
    assert {result.device for result in results} == {device}
    assert [result.tolist() for result in results] == [
        [1, 3, 5, 7],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 1, 2, 3, 4],
        [[1, 3], [5, 7]][rank],
    ]
    assert end.wait() == [True, False, True]


def test_every_collective() -> None:
    on_machines(every_collective)


def other_streams(rank: int, devices: list[torch.device]) -> None:
    """One stream computes, another one takes the result and uses the memory again. The host sends what is ready."""
    machines = all_machines()
    device, marks = devices[1], []
    all_reduce_ = distributed.all_reduce

    def sends(*args: Any, **kwargs: Any) -> Any:
        with torch.Stream(device):  # what the host has waited for, any stream may read
            marks[-1] * 1
        return all_reduce_(*args, **kwargs)

    distributed.all_reduce = sends
    for step in range(3):
        round = machines.queue.begin_round("backward", str(step))
        side = torch.Stream(device)
        with side:
            flat = torch.ones(4, device=device) * (step + rank)
            marks.append(torch.ones(4, device=device))
            staged = [stage(machines, flat), stage(machines, flat, 8)]
        launched = [
            round.launch("a sum", partial(all_reduce, machines, staged[0])),
            round.launch("a gather", partial(all_gather, machines, staged[1])),
        ]
        end = round.end([])
        total, whole = (each.wait() for each in launched)
        flat.zero_()
        assert total.tolist() == [2.0 * step + 1] * 4
        assert whole.tolist() == [float(step)] * 4 + [step + 1.0] * 4
        end.wait()
    torch.accelerator.synchronize(device)


@pytest.mark.devices("sim")
def test_the_stream_that_takes_a_result_comes_after_the_one_that_has_computed() -> None:
    on_machines(other_streams)
