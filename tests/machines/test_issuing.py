"""What is issued comes in the order in which it was put, and a launch that blocks holds up no agreement."""

from __future__ import annotations

import threading

import pytest
import torch

from dataparallel.machines.collectives import Transfer, all_reduce
from dataparallel.machines.group import Machines
from dataparallel.machines.issuing import Issuing
from machine_ranks import on_machines


@pytest.mark.devices("cpu")  # it knows no slots: once is enough
class TestIssuing:
    def test_calls_come_one_after_the_other(self) -> None:
        issuing, called = Issuing(), []
        issued = [issuing.put(lambda i=i: called.append(i)) for i in range(100)]
        for each in issued:
            each.result(30)
        assert called == [*range(100)]

    def test_an_error_is_of_its_call_alone(self) -> None:
        issuing, called = Issuing(), []
        failed, issued = issuing.put(lambda: 1 / 0), issuing.put(lambda: called.append(1))
        with pytest.raises(ZeroDivisionError):
            failed.result(30)
        issued.result(30)
        assert called == [1]


def agrees_while_a_launch_blocks(rank: int, devices: list[torch.device]) -> None:
    """As in a launch of NCCL to which another rank has not come."""
    machines = Machines.of(None)
    other = machines.another()
    is_blocked, may_go_on = threading.Event(), threading.Event()

    def blocks() -> Transfer:
        is_blocked.set()
        assert may_go_on.wait(30)
        return all_reduce(machines, torch.ones(1))

    round = machines.line.begin("a sum", "")
    launched = round.launch("what blocks", blocks)
    end = round.end([])
    assert is_blocked.wait(30)
    said = other.line.begin("another round", "")
    ranks = said.say("the ranks", lambda: rank)
    said.end([]).wait()
    assert ranks.wait() == [0, 1]
    assert not launched.is_decided
    may_go_on.set()
    assert launched.wait().tolist() == [2]
    end.wait()


def test_ranks_agree_while_a_launch_blocks() -> None:
    on_machines(agrees_while_a_launch_blocks)
