"""Rounds that differ or fail end for themselves, with the ranks named, and later rounds work; so do calls of hooks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.futures import Future

from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesDiffer, MachinesError, PeerFailed
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import PendingResult
from machine_ranks import all_machines, hooked, on_machines, on_mortal_machines, summed

pytestmark = pytest.mark.devices("cpu")  # what is sent is in host memory: once is enough


def reduce(machines: Machines) -> Callable[[], Transfer]:
    return lambda: summed(machines, torch.ones(3))


def whole_round(
    machines: Machines, kind: str = "backward", contents: str = "", error: Any = None
) -> list[PendingResult]:
    round = machines.queue.begin_round(kind, contents)
    launched = [round.launch(f"bucket {number}", reduce(machines)) for number in range(2)]
    return [*launched, round.end([True], error)]


def assert_works(machines: Machines) -> None:
    *launched, end = whole_round(machines)
    assert [each.wait().tolist() for each in launched] == [[machines.size] * 3] * 2
    assert end.wait() == [True]


def messages(launched: list[PendingResult], error: type[BaseException]) -> str:
    """What all of them raise, which is the same."""
    said = set()
    for each in launched:
        with pytest.raises(error) as raised:
            each.wait()
        said.add(str(raised.value))
    assert len(said) == 1
    return said.pop()


def differ(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    for _ in range(2):
        shape = [3, 4][rank == 2]
        text = messages(whole_round(machines, "backward", f"a: [2]\nb: [{shape}]\nc: [1]"), MachinesDiffer)
        assert "b: [3] on ranks 0 and 1, [4] on rank 2" in text
        assert "a: [2]" not in text
        assert "c: [1]" not in text
        assert_works(machines)
    text = messages(whole_round(machines, "backward" if rank == 0 else "buffers"), MachinesDiffer)
    assert "'backward' begins on rank 0; 'buffers' begins on ranks 1 and 2" in text
    text = messages(whole_round(machines, "start", "".join(f"{rank} {line}\n" for line in range(100))), MachinesDiffer)
    assert "only rank 0 has 0 0, 0 1, 0 2" in text
    assert " and 80 more" in text
    assert_works(machines)


def test_ranks_that_differ_are_told_how_and_send_nothing() -> None:
    on_machines(differ, ranks=3)


def fails_before(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    for _ in range(2):
        if rank == 1:
            machines.queue.signal_failure(ValueError("no such\ncolumn"))
        else:
            text = messages(whole_round(machines), PeerFailed)
            assert "rank 1 failed before a round: ValueError: no such column" in text
            assert "rank 0" not in text
        assert_works(machines)
    machines.queue.signal_failure(ValueError(f"here too: {rank}"))  # on every rank
    assert_works(machines)


def test_a_failure_before_a_round_is_the_others_next_round() -> None:
    on_machines(fails_before)


def fails_within(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    for _ in range(2):
        *_, end = whole_round(machines, error=ValueError("no such column") if rank else None)
        text = messages([end], PeerFailed)
        assert "ranks 1 and 2" not in text
        assert "rank 1 failed in 'backward': ValueError: no such column; rank 2 failed in 'backward'" in text
        assert_works(machines)


def test_a_failure_within_a_round_is_raised_at_its_end_on_every_rank() -> None:
    on_machines(fails_within, ranks=3)


def raises(rank: int, devices: list[torch.device]) -> None:
    """Rank 1 fails in its second collective; the others have nobody to talk to then."""
    machines = all_machines()
    round = machines.queue.begin_round("backward", "")
    launched = [round.launch("bucket 0", reduce(machines))]

    def fail() -> Any:
        raise ValueError("on purpose")

    launched.append(round.launch("bucket 1", fail if rank == 1 else reduce(machines)))
    launched.append(round.launch("bucket 2", reduce(machines)))
    launched.append(round.end([True]))
    assert launched[0].wait().tolist() == [2, 2, 2]
    began = time.monotonic()
    if rank == 1:
        with pytest.raises(ValueError, match="on purpose"):
            launched[1].wait()
    with pytest.raises(
        PeerFailed, match=r"rank 1 failed in bucket 1 of 'backward': .*ValueError: on purpose"
    ) as raised:
        launched[-1].wait()
    assert "Start all processes again" in str(raised.value)
    assert time.monotonic() - began < 3.5
    assert re.search("bucket 1", messages(whole_round(machines), PeerFailed))  # the group is broken for good
    if rank == 1:
        time.sleep(5)  # the others are told by this rank, not by the end of its process


def test_what_fails_on_one_rank_is_raised_there_and_the_others_do_not_hang() -> None:
    for end in on_mortal_machines(raises, group_timeout=30):
        assert end.error is None


def in_order(rank: int, devices: list[torch.device]) -> list[str]:
    machines = all_machines()
    issued: list[str] = []

    def hook(name: str) -> Callable[[], Future[Tensor]]:
        def call() -> Future[Tensor]:
            issued.append(f"{name} begins")
            future: Future[Tensor] = Future()

            def end() -> None:
                issued.append(f"{name} ends")
                future.set_result(torch.ones(1))

            threading.Timer(0.05, end).start()
            return future

        return call

    def collective(name: str) -> Callable[[], Transfer]:
        def call() -> Transfer:
            issued.append(name)
            return summed(machines, torch.ones(1))

        return call

    round = machines.queue.begin_round("backward", "")
    launched = [hooked(round, "a", hook("a")), round.launch("b", collective("b")), hooked(round, "c", hook("c"))]
    launched.append(round.end([]))
    for each in launched:
        each.wait()
    return issued


def test_hooks_and_collectives_are_issued_one_after_the_other() -> None:
    for issued in on_machines(in_order):
        assert issued == ["a begins", "a ends", "b", "c begins", "c ends"]


def from_threads(rank: int, devices: list[torch.device]) -> None:
    """Results are waited for by other threads than the one that launches, before they are launched elsewhere."""
    machines = all_machines()
    for step in range(20):
        round = machines.queue.begin_round("backward", str(step))
        flats = [torch.full((5,), float(bucket + rank)) for bucket in range(4)]
        launched = [round.launch(str(i), lambda flat=flat: summed(machines, flat)) for i, flat in enumerate(flats)]
        results: list[Any] = [None] * 4

        def wait(place: int, launched: list[PendingResult] = launched, results: list[Any] = results) -> None:
            results[place] = launched[place].wait().tolist()

        threads = [threading.Thread(target=wait, args=[place]) for place in reversed(range(4))]
        for thread in threads:
            thread.start()
        time.sleep(0.001 * rank)
        end = round.end([])
        for thread in threads:
            thread.join()
        assert results == [[2.0 * bucket + 1] * 5 for bucket in range(4)]
        assert end.wait() == []


def test_any_thread_may_wait() -> None:
    on_machines(from_threads)


def after_the_end(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    round = machines.queue.begin_round("backward", "")
    round.end([]).wait()
    with pytest.raises(RuntimeError, match="'backward' has ended"):
        round.launch("bucket 0", reduce(machines))
    with pytest.raises(RuntimeError, match="'backward' has ended"):
        round.end([])


def test_nothing_is_added_after_the_end() -> None:
    on_machines(after_the_end)


# ---- calls of functions that send something themselves ---------------------------------------------------------------


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
