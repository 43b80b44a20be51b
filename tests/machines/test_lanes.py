"""Lanes: what ranks differ in or fail with is an error on all of them, with the ranks named, and later steps work."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import distributed

from dataparallel.machines.arguments import machines_of
from dataparallel.machines.errors import MachinesDiffer, PeerFailed
from dataparallel.machines.group import Result
from dataparallel.machines.lanes import Lane, Machines
from dataparallel.machines.start import send_values
from machine_ranks import all_machines, on_machines, summed

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough


def a_pass(lane: Lane, *texts: str) -> list[Result]:
    epoch = lane.machines.epoch
    sums = [summed(lane, torch.ones(3), text, epoch) for text in texts or ("bucket 0", "bucket 1")]
    return [*sums, lane.end("backward", [True], epoch=epoch)]


def assert_works(lane: Lane) -> None:
    *sums, end = a_pass(lane)
    assert [each.wait().tolist() for each in sums] == [[lane.machines.size] * 3] * 2
    assert end.wait()[0] == [True]


def message(results: list[Result], error: type[BaseException]) -> str:
    """What all of them raise, which is the same."""
    with pytest.raises(error) as raised:
        results[-1].wait()
    for each in results:
        with pytest.raises(error) as again:
            each.wait()
        assert str(again.value) == str(raised.value)
    return str(raised.value)


def differ(rank: int, devices: list[torch.device]) -> None:
    lane = all_machines().lane("steps")
    for _ in range(2):
        text = message(a_pass(lane, f"backward\na: [2]\nb: [{[3, 4][rank == 2]}]\nc: [1]"), MachinesDiffer)
        assert "b: [3] on ranks 0 and 1; [4] on rank 2" in text
        assert "a: [2]" not in text
        assert_works(lane)
    text = message(a_pass(lane, "backward" if rank == 0 else "buffers"), MachinesDiffer)
    assert "backward: there on rank 0; not there on ranks 1 and 2; buffers: not there on rank 0" in text
    assert_works(lane)


def test_ranks_that_differ_are_told_how_and_send_nothing() -> None:
    on_machines(differ, ranks=3)


def another_order(rank: int, devices: list[torch.device]) -> None:
    """All pairs of items have come before, so nothing is compared: the word at the end tells."""
    lane = all_machines().lane("steps")
    for text in ("ab", "ba", "aab", "bba", "ab"):
        a_pass(lane, *text)[-1].wait()
    end = a_pass(lane, *("ab" if rank == 0 else "ba"))[-1]
    with pytest.raises(MachinesDiffer, match="have not sent the same things in one order"):
        end.wait()
    assert_works(lane)


def test_what_comes_in_another_order_later_is_told_before_it_is_used() -> None:
    on_machines(another_order)


def fails(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    lane, other = machines.lane("steps"), machines.lane("others")
    for _ in range(2):
        epoch = machines.epoch
        if rank == 1:
            machines.state.leave(epoch, ValueError("no such\ncolumn"))
            with pytest.raises(PeerFailed):  # a thread of the failed step knows it
                summed(other, torch.ones(1), epoch=epoch).wait()
        else:
            text = message(a_pass(lane), PeerFailed)
            assert "rank 1 failed: ValueError: no such column" in text
            assert "rank 0" not in text
        assert_works(lane)
        assert_works(other)
    machines.state.leave(machines.epoch, ValueError(f"here too: {rank}"))  # on every rank
    assert_works(lane)


def test_a_failure_is_raised_where_the_others_wait_and_the_next_step_works() -> None:
    on_machines(fails)


def fails_later(rank: int, devices: list[torch.device]) -> None:
    """What was sent before a failure still arrives: a step is done by all ranks or by none."""
    machines = all_machines()
    lane = machines.lane("steps")
    assert_works(lane)
    end = a_pass(lane)[-1]
    if rank == 1:
        end.wait()
        machines.state.leave(machines.epoch, ValueError("in the next step"))
    else:
        time.sleep(1)
        end.wait()
        assert "in the next step" in message(a_pass(lane), PeerFailed)
    assert_works(lane)


def test_a_rank_that_is_late_ends_the_step_before_a_failure() -> None:
    on_machines(fails_later, ranks=3)


def raises(rank: int, devices: list[torch.device]) -> None:
    """Rank 1 fails in its second collective."""
    lane = all_machines().lane("steps")
    assert_works(lane)

    def fail(link: Any) -> Any:
        raise ValueError("on purpose")

    epoch, first = lane.machines.epoch, summed(lane, torch.ones(3), "bucket 0")
    if rank == 1:
        (second,) = lane.launch("backward", ["bucket 1"], [fail], "bucket 1", epoch=epoch)
    else:
        second = summed(lane, torch.ones(3), "bucket 1", epoch)
    end = lane.end("backward", [True], epoch=epoch)
    assert first.wait().tolist() == [2, 2, 2]
    with pytest.raises(ValueError if rank == 1 else PeerFailed, match="on purpose"):
        second.wait()
    with pytest.raises(PeerFailed, match=r"rank 1 failed in bucket 1 of 'backward': ValueError: on purpose"):
        end.wait()
    assert_works(lane)


def test_what_fails_on_one_rank_is_raised_there_and_the_others_do_not_hang() -> None:
    on_machines(raises)


def two_groups(rank: int, devices: list[torch.device]) -> None:
    """Each rank uses them in another order, and waits in another order."""
    lanes = [all_machines().lane("steps"), all_machines().lane("steps"), Machines.of(distributed.new_group()).lane("x")]
    for step in range(20):
        places = random.Random(rank + 10 * step).sample(range(3), 3)
        passes = {place: a_pass(lanes[place]) for place in places}
        for place in reversed(places):
            assert passes[place][0].wait().tolist() == [3.0] * 3
            assert passes[place][-1].wait()[0] == [True]


def test_lanes_do_not_wait_for_each_other() -> None:
    on_machines(two_groups, ranks=3)


def parts(rank: int, devices: list[torch.device]) -> None:
    pairs = [distributed.new_group([0, 1]), distributed.new_group([1, 2])]
    for pair, ranks in zip(pairs, ([0, 1], [1, 2]), strict=True):
        if rank in ranks:
            machines = Machines.of(pair)
            assert Machines.of(pair) is machines
            assert (machines.rank, machines.size, machines.ranks) == (ranks.index(rank), 2, ranks)
            value = torch.ones(1) * rank
            assert summed(machines.lane("x"), value.clone()).wait() == sum(ranks)
            send_values(machines.words, {"w": value})
            assert value == ranks[0]  # rank 0 is that of the group
        else:
            with pytest.raises(ValueError, match="is no member of the group"):
                machines_of(pair, None)


def test_groups_of_some_ranks() -> None:
    on_machines(parts, ranks=3)
