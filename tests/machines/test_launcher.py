"""What is issued comes in the order in which it was put. A launch that blocks or fails holds up no other group."""

from __future__ import annotations

import sys
import threading
import time
import weakref

import pytest
import torch
from torch import distributed

from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.group import Machines
from dataparallel.machines.launcher import Issuing, launcher
from machine_ranks import all_machines, on_machines, summed

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough


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

    def test_an_error_that_would_end_a_thread_is_an_ordinary_one(self) -> None:
        issuing = Issuing()
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            issuing.put(lambda: sys.exit(3)).result(30)

    def test_a_call_without_a_thread_is_not_made_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        issuing, called = Issuing(), []
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                issuing.put(lambda: called.append(0))
        issuing.put(lambda: called.append(1)).result(30)
        assert called == [1]

    def test_the_end_waits_for_a_call_but_not_for_ever(self) -> None:
        issuing, called = Issuing(), []
        begun, may_end = threading.Event(), threading.Event()

        def lasts() -> None:
            begun.set()
            assert may_end.wait(30)

        first = issuing.put(lasts)
        issuing.put(lambda: called.append(1))
        assert begun.wait(30)
        issuing.close(time.monotonic() + 0.01)
        assert not first.done()
        may_end.set()
        first.result(30)
        issuing.close(time.monotonic() + 30)
        assert called == []

    def test_calls_after_an_end_are_made(self) -> None:
        """Also if nothing was ever asked of it before."""
        issuing = Issuing()
        for _ in range(2):
            assert issuing.close(time.monotonic() + 5)
            assert issuing.put(lambda: None).result(5) is None


def agrees_while_a_launch_blocks(rank: int, devices: list[torch.device]) -> None:
    """As in a launch of NCCL to which another rank has not come."""
    machines = all_machines()
    other = machines.another()
    is_blocked, may_go_on = threading.Event(), threading.Event()

    def blocks() -> Transfer:
        is_blocked.set()
        assert may_go_on.wait(30)
        return summed(machines, torch.ones(1))

    round = machines.queue.begin_round("a sum", "")
    launched = round.launch("what blocks", blocks)
    end = round.end([])
    assert is_blocked.wait(30)
    said = other.queue.begin_round("another round", "")
    ranks = said.all_gather_object("the ranks", lambda: rank)
    said.end([]).wait()
    assert ranks.wait() == [0, 1]
    assert not launched.is_decided
    may_go_on.set()
    assert launched.wait().tolist() == [2]
    end.wait()


def test_ranks_agree_while_a_launch_blocks() -> None:
    on_machines(agrees_while_a_launch_blocks)


def a_sum(machines: Machines) -> float:
    round = machines.queue.begin_round("a sum", "")
    launched = round.launch("the sum", lambda: summed(machines, torch.ones(1)))
    round.close()
    return float(launched.wait())


def breaks_where_it_has_a_number(rank: int, devices: list[torch.device]) -> None:
    """Rank 1 proposes no number before rank 0's group is broken, in the moment in which rank 0 waits for that."""
    machines, other = all_machines(), Machines.of(distributed.new_group())
    queue, order, may_go_on = machines.queue, launcher().order, threading.Event()
    advance, propose = queue.advance, order.propose

    def advance_and_break() -> None:
        advance()
        if queue.name in order._numbers and machines._health.broken is None:
            machines._health.break_with(MachinesError("gone"))

    def propose_late(name: str) -> int:
        assert may_go_on.wait(30)
        return propose(name)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(queue, "advance", advance_and_break)
        else:
            patch.setattr(order, "propose", propose_late)
        launched = queue.begin_round("a sum", "").launch("the sum", lambda: summed(machines, torch.ones(1)))
        if rank == 0:
            with pytest.raises(MachinesError, match="gone"):
                launched.wait()
        distributed.barrier()
        machines._health.break_with(MachinesError("gone"))
        may_go_on.set()
        assert a_sum(other) == 2


def test_a_broken_group_leaves_no_number_in_the_order() -> None:
    on_machines(breaks_where_it_has_a_number)


def breaks_while_a_launch_blocks(rank: int, devices: list[torch.device]) -> None:
    class Held:
        pass

    machines, other = all_machines(), Machines.of(distributed.new_group())
    held, is_blocked, may_go_on = Held(), threading.Event(), threading.Event()
    alive = weakref.ref(held)

    def blocks(held: Held = held) -> Transfer:
        is_blocked.set()
        assert may_go_on.wait(30)
        return summed(machines, torch.ones(1))

    round = machines.queue.begin_round("a sum", "")
    launched = round.launch("what blocks", blocks)
    del held, blocks
    assert is_blocked.wait(30)
    machines._health.break_with(MachinesError("gone"))
    with pytest.raises(MachinesError, match="gone"):
        launched.wait()
    del launched, round
    may_go_on.set()
    assert a_sum(other) == 2
    deadline = time.monotonic() + 5
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() is None


def test_what_was_issued_in_a_broken_group_is_dropped() -> None:
    on_machines(breaks_while_a_launch_blocks)


def exits(rank: int, devices: list[torch.device]) -> None:
    machines, other = all_machines(), Machines.of(distributed.new_group())
    launched = machines.queue.begin_round("a sum", "").launch("what exits", lambda: sys.exit(3))
    with pytest.raises((RuntimeError, MachinesError), match="SystemExit: 3"):
        launched.wait()
    assert a_sum(other) == 2


def test_an_exit_in_a_launch_breaks_its_group_alone() -> None:
    on_machines(exits)
