"""Rounds that differ or fail end for themselves, with the ranks named, and later rounds work."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from dataparallel.machines.collectives import Transfer
from dataparallel.machines.errors import MachinesDiffer, PeerFailed
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import Launched
from machine_ranks import all_machines, hooked, on_machines, on_mortal_machines, summed


def reduce(machines: Machines) -> Callable[[], Transfer]:
    return lambda: summed(machines, torch.ones(3))


def whole_round(machines: Machines, kind: str = "backward", contents: str = "", error: Any = None) -> list[Launched]:
    round = machines.queue.begin_round(kind, contents)
    launched = [round.launch(f"bucket {number}", reduce(machines)) for number in range(2)]
    return [*launched, round.end([True], error)]


def assert_works(machines: Machines) -> None:
    *launched, end = whole_round(machines)
    assert [each.wait().tolist() for each in launched] == [[machines.size] * 3] * 2
    assert end.wait() == [True]


def messages(launched: list[Launched], error: type[BaseException]) -> str:
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
    on_machines(differ, ranks=3, kind="cpu")


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
    on_machines(fails_before, kind="cpu")


def fails_within(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    for _ in range(2):
        *_, end = whole_round(machines, error=ValueError("no such column") if rank else None)
        text = messages([end], PeerFailed)
        assert "ranks 1 and 2" not in text
        assert "rank 1 failed in 'backward': ValueError: no such column; rank 2 failed in 'backward'" in text
        assert_works(machines)


def test_a_failure_within_a_round_is_raised_at_its_end_on_every_rank() -> None:
    on_machines(fails_within, ranks=3, kind="cpu")


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
    for end in on_mortal_machines(raises, kind="cpu", group_timeout=30):
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
    for issued in on_machines(in_order, kind="cpu"):
        assert issued == ["a begins", "a ends", "b", "c begins", "c ends"]


def from_threads(rank: int, devices: list[torch.device]) -> None:
    """Results are waited for by other threads than the one that launches, before they are launched elsewhere."""
    machines = all_machines()
    for step in range(20):
        round = machines.queue.begin_round("backward", str(step))
        flats = [torch.full((5,), float(bucket + rank)) for bucket in range(4)]
        launched = [round.launch(str(i), lambda flat=flat: summed(machines, flat)) for i, flat in enumerate(flats)]
        results: list[Any] = [None] * 4

        def wait(place: int, launched: list[Launched] = launched, results: list[Any] = results) -> None:
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
    on_machines(from_threads, kind="cpu")


def after_the_end(rank: int, devices: list[torch.device]) -> None:
    machines = all_machines()
    round = machines.queue.begin_round("backward", "")
    round.end([]).wait()
    with pytest.raises(RuntimeError, match="'backward' has ended"):
        round.launch("bucket 0", reduce(machines))
    with pytest.raises(RuntimeError, match="'backward' has ended"):
        round.end([])


def test_nothing_is_added_after_the_end() -> None:
    on_machines(after_the_end, kind="cpu")
