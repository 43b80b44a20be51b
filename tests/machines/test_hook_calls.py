"""Calls of functions that send something themselves: one at a time, and a failure on one rank is one on all."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import distributed as dist

from dataparallel.machines.errors import MachinesError, PeerFailed
from dataparallel.machines.group import Machines
from machine_ranks import all_machines, on_machines, on_mortal_machines


class Sums:
    """A hook that sums a number over the default group."""

    def __init__(self, value: float, fails: str = "") -> None:
        self.tensor, self.fails, self.calls = torch.tensor([value]), fails, 0

    def begin(self) -> Any:
        self.calls += 1
        if self.fails == "before":
            raise ValueError("no pen")
        future = dist.all_reduce(self.tensor, async_op=True).get_future()
        if self.fails == "after":
            raise ValueError("no ink")
        return future

    def check(self) -> None:
        if self.fails == "check":
            raise ValueError("no paper")


def in_a_round(machines: Machines, hooks: list[Sums]) -> list[Any]:
    """What the waits for the calls of one round raise, or `None`."""
    round = machines.queue.begin_round("backward", "the same everywhere")
    made = [round.call(f"call {i}", hook.begin, hook.check) for i, hook in enumerate(hooks)]
    end = round.end([True])
    found: list[Any] = []
    for call in made:
        try:
            call.wait()
            found.append(None)
        except Exception as error:
            found.append(error)
    with suppress(MachinesError):
        end.wait()  # what comes later is not to be sent beside it
    return found


def one_after_the_other(rank: int, devices: list[torch.device]) -> None:
    """The second call is made when the future of the first is done, which sends something in between."""
    machines, order = all_machines(), []

    def sends_twice(name: str) -> Any:
        def begin() -> Any:
            order.append(f"{name} begins")

            def more(future: Any) -> Any:
                time.sleep(0.05 * rank)
                dist.all_reduce(torch.ones(2))
                order.append(f"{name} ends")
                return future.value()

            return dist.all_reduce(torch.ones(3), async_op=True).get_future().then(more)

        return begin

    round = machines.queue.begin_round("backward", "two")
    made = [round.call(name, sends_twice(name), lambda: None) for name in "ab"]
    end = round.end([True])
    for call in made:
        call.wait()
    assert end.wait() == [True]
    assert order == ["a begins", "a ends", "b begins", "b ends"]


def test_a_call_is_made_when_the_future_of_the_one_before_is_done() -> None:
    on_machines(one_after_the_other)


def failing(rank: int, devices: list[torch.device], fails: str) -> None:
    machines = all_machines()
    mine = [Sums(1.0), Sums(2.0, fails if rank == 1 else ""), Sums(3.0)]
    first, second, third = in_a_round(machines, mine)
    assert mine[0].tensor.item() == 2
    assert mine[2].calls == 0, "a call was made after a failure"
    assert first is None or isinstance(first, (PeerFailed, ValueError))
    if rank == 1:
        assert isinstance(second, ValueError)
    else:
        assert isinstance(second, PeerFailed)
        assert f"rank 1 failed: ValueError: {second.args[0].split('ValueError: ')[1]}" in str(second)
        assert isinstance(third, PeerFailed)
    again = [Sums(5.0)]
    assert in_a_round(machines, again) == [None]
    assert again[0].tensor.item() == 10


@pytest.mark.parametrize("fails", ["after", "check"])
def test_after_a_failure_on_one_rank_all_raise_and_the_next_round_works(fails: str) -> None:
    on_machines(failing, fails)


def failing_everywhere(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    (found,) = in_a_round(machines, [Sums(1.0, "before")])
    assert isinstance(found, ValueError)
    again = [Sums(5.0)]
    assert in_a_round(machines, again) == [None]
    assert again[0].tensor.item() == 10


def test_after_a_failure_on_all_ranks_the_next_round_works() -> None:
    on_machines(failing_everywhere)


def unanswered(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    began = time.monotonic()
    (found,) = in_a_round(machines, [Sums(1.0, "before" if rank == 1 else "")])
    took = time.monotonic() - began
    if rank == 1:
        assert isinstance(found, ValueError)
    elif dist.get_debug_level() == dist.DebugLevel.DETAIL:
        assert took < 25  # torch itself waits for the other rank before it sends
        assert "failed to pass monitoredBarrier" in str(found)
    else:
        assert took < 15, "it has waited for the group's timeout"
        assert "no pen" in str(found)
        assert "failed on another rank" in str(found)
    (later,) = in_a_round(machines, [Sums(5.0)])
    assert isinstance(later, MachinesError)
    assert "Start all processes again" in str(later)


def test_what_gets_no_answer_breaks_the_group_instead_of_hanging() -> None:
    """The ranks do not meet at the end: the default group is out of step."""
    ended = on_mortal_machines(unanswered, group_timeout=20)
    assert [each.error for each in ended] == [None, None]
