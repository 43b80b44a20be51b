"""Lanes: what ranks differ in or fail with is an error on all of them, with the ranks named, and ends their group."""

from __future__ import annotations

import random
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from dataparallel.machines.arguments import machines_of
from dataparallel.machines.errors import MachinesDiffer, PeerFailed
from dataparallel.machines.lanes import Lane, Machines
from dataparallel.machines.start import send_values
from machine_ranks import all_machines, assert_over, new_machines, on_machines, said, summed

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough


def a_pass(lane: Lane, *texts: str) -> list[Any]:
    sums = [summed(lane, torch.ones(3), text) for text in texts or ("bucket 0", "bucket 1")]
    return [*sums, lane.end("backward", [True])]


def assert_works(lane: Lane) -> None:
    *sums, end = a_pass(lane)
    assert [each.wait().tolist() for each in sums] == [[lane.machines.size] * 3] * 2
    assert end.wait()[0] == [True]


def message(results: list[Any], error: type[BaseException]) -> str:
    """What all of them raise, which is the same."""
    with pytest.raises(error) as raised:
        results[-1].wait()
    for each in results:
        with pytest.raises(error) as again:
            each.wait()
        assert str(again.value) == str(raised.value)
    return str(raised.value)


def differ(rank: int, devices: list[torch.device]) -> None:
    machines = new_machines()
    assert_works(Lane(machines, "steps"))
    lane = Lane(machines, "steps")
    text = message(a_pass(lane, f"backward\na: [2]\nb: [{[3, 4][rank == 2]}]\nc: [1]"), MachinesDiffer)
    assert "b: [3] on ranks 0 and 1; b: [4] on rank 2" in text
    assert "a: [2]" not in text
    assert_over(machines, text)
    lane = Lane(new_machines(), "steps")
    text = message(a_pass(lane, "backward" if rank == 0 else "buffers"), MachinesDiffer)
    assert "backward on rank 0; buffers on ranks 1 and 2" in text


def test_ranks_that_differ_are_told_how_and_send_nothing() -> None:
    on_machines(differ, ranks=3)


def differ_outside_of_steps(rank: int, devices: list[torch.device]) -> None:
    """All ranks get the same error from the word, and nothing else is under way."""
    machines = all_machines()
    for _ in range(2):
        assert said(machines.words.gather("a word", str(rank), None).wait).startswith("MachinesDiffer")
        assert_works(Lane(machines, "steps"))


def test_a_difference_outside_of_steps_does_not_end_the_group() -> None:
    on_machines(differ_outside_of_steps)


def another_order(rank: int, devices: list[torch.device]) -> None:
    """All pairs of items have come before, so nothing is compared: the word at the end tells."""
    machines = all_machines()
    lane = Lane(machines, "steps")
    for text in ("ab", "ba", "aab", "bba", "ab"):
        a_pass(lane, *text)[-1].wait()
    end = a_pass(lane, *("ab" if rank == 0 else "ba"))[-1]
    with pytest.raises(MachinesDiffer, match="have not sent the same things in one order"):
        end.wait()
    assert_over(machines, "have not sent the same things in one order")


def test_what_comes_in_another_order_later_is_told_before_it_is_used() -> None:
    on_machines(another_order)


def fails(rank: int, devices: list[torch.device], has_sent: bool) -> None:
    machines = all_machines()
    lane, other = Lane(machines, "steps"), Lane(machines, "others")
    if has_sent:
        assert_works(lane)
    words, began = "rank 1 failed: ValueError: no such column. ", time.monotonic()
    if rank == 1:
        time.sleep(1)  # the others wait by then
        machines.state.fail(ValueError("no such\ncolumn"))
        assert words in said(summed(other, torch.ones(1)).wait)  # a thread of the failed step knows it
    else:
        text = message(a_pass(lane), PeerFailed)
        assert words in text
        assert "rank 0" not in text
    assert time.monotonic() - began < 5
    machines.state.fail(ValueError("later"))
    assert_over(machines, words)


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_failure_is_raised_where_the_others_wait_and_by_every_later_use(has_sent: bool) -> None:
    """Also before the ranks are connected, which blocks a client of the store."""
    on_machines(fails, has_sent, ranks=3)


def over_tcp(rank: int, devices: list[torch.device], port: int) -> None:
    """torchrun has a store of this kind. One client of it serves one thread at a time."""
    distributed.destroy_process_group()
    where = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=40))
    fails(rank, devices, False)
    distributed.barrier()  # the store is in one of the processes


def test_a_failure_is_heard_while_ranks_wait_for_a_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_machines(over_tcp, port)


class Communicator:
    """NCCL's, whose streams wait for the other ranks until it is aborted."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


def aborts(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    machines.state.nccl[machines.places] = communicator = Communicator()
    if rank == 1:
        machines.state.fail(ValueError("on purpose"))
    assert "on purpose" in said(summed(Lane(machines, "steps"), torch.ones(1)).wait)
    assert communicator.is_aborted.wait(5)


def test_communicators_are_aborted_on_every_rank() -> None:
    on_machines(aborts)


def fails_at_once(rank: int, devices: list[torch.device]) -> str:
    """All ranks fail: they agree which was the first."""
    machines = all_machines()
    machines.state.fail(ValueError(f"on {rank}"))
    return said(summed(Lane(machines, "steps"), torch.ones(1)).wait)


def test_there_is_one_first_failure() -> None:
    first, *others = on_machines(fails_at_once, ranks=3)
    assert first.startswith("PeerFailed: rank ")
    assert others == [first] * 2


class Collects:
    """A store in whose operation the garbage collector ends a pass that has failed, which tells the others."""

    def __init__(self, state: Any) -> None:
        self._state, self._store = state, state.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, *args: str) -> Any:
        self._state.store = self._store
        self._state.fail(RuntimeError("collected"))
        return self._store.compare_set(*args)


def collects(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    if rank == 0:
        machines.state.store = Collects(machines.state)
        machines.state.fail(ValueError("before"))
    assert_over(machines, "rank 0 failed: RuntimeError: collected. ")


def test_a_pass_may_be_collected_while_a_failure_is_told() -> None:
    on_machines(collects, group_timeout=10)


def fails_later(rank: int, devices: list[torch.device]) -> None:
    """What has arrived before a failure counts: a step is done by all ranks or by none."""
    machines = all_machines()
    lane = Lane(machines, "steps")
    assert_works(lane)
    *sums, end = a_pass(lane)
    if rank == 1:
        end.wait()
        machines.state.fail(ValueError("in the next step"))
    else:
        time.sleep(1)
        end.wait()
        assert [each.wait().tolist() for each in sums] == [[3] * 3] * 2
        assert "in the next step" in message(a_pass(lane), PeerFailed)
    assert_over(machines, "in the next step")


def test_a_rank_that_is_late_ends_the_step_before_a_failure() -> None:
    on_machines(fails_later, ranks=3)


def raises(rank: int, devices: list[torch.device]) -> None:
    """Rank 1 fails in its second collective."""
    lane = Lane(all_machines(), "steps")
    assert_works(lane)

    def fail(link: Any) -> Any:
        raise ValueError("on purpose")

    first = summed(lane, torch.ones(3), "bucket 0")
    if rank == 1:
        (second,) = lane.launch("backward", ["bucket 1"], [fail], "bucket 1")
        with pytest.raises(ValueError, match="on purpose"):
            second.wait()
    else:
        assert first.wait().tolist() == [2, 2, 2]
        second = summed(lane, torch.ones(3), "bucket 1")
        with pytest.raises(PeerFailed, match="on purpose"):
            second.wait()
    with pytest.raises(PeerFailed, match=r"rank 1 failed in bucket 1 of 'backward': ValueError: on purpose"):
        lane.end("backward", [True]).wait()
    assert_over(lane.machines, "rank 1 failed in bucket 1 of 'backward': ValueError: on purpose")


def test_what_fails_on_one_rank_is_raised_there_and_the_others_do_not_hang() -> None:
    on_machines(raises)


def two_groups(rank: int, devices: list[torch.device]) -> None:
    """Each rank uses them in another order, and waits in another order."""
    lanes = [
        Lane(all_machines(), "steps"),
        Lane(all_machines(), "steps"),
        Lane(Machines.of(distributed.new_group()), "x"),
    ]
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
            assert summed(Lane(machines, "x"), value.clone()).wait() == sum(ranks)
            send_values(machines.words, {"w": value})
            assert value == ranks[0]  # rank 0 is that of the group
        else:
            with pytest.raises(ValueError, match="is no member of it"):
                machines_of(pair, None)


def test_groups_of_some_ranks() -> None:
    on_machines(parts, ranks=3)
