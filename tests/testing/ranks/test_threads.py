"""`on_threads`: torch's threaded process group, and threads that fail or hang."""

import sys
import threading
import time
import unittest

import pytest
import torch

from dataparallel.testing import Rank, RanksFailed
from dataparallel.testing.ranks import on_threads, threaded_group, threads

pytestmark = pytest.mark.devices("cpu")


@pytest.fixture(autouse=True)
def nothing_stays():
    before = threading.active_count(), torch.distributed.distributed_c10d._world
    yield
    assert (threading.active_count(), torch.distributed.distributed_c10d._world) == before
    assert not torch.distributed.is_initialized()


@pytest.mark.smoke
def test_collectives_and_results_in_order():
    def add(rank: Rank, x: torch.Tensor, times: int) -> list[float]:
        x = x * rank.number * times
        torch.distributed.all_reduce(x)
        return x.tolist()

    assert on_threads(add, torch.ones(2), ranks=4, times=2) == [[12.0, 12.0]] * 4
    assert on_threads(lambda rank: (rank.number, rank.count, str(rank.device), rank.place)) == [
        (0, 2, "cpu", "threads"),
        (1, 2, "cpu", "threads"),
    ]


def test_a_thread_that_raises_releases_the_others():
    def second_raises(rank: Rank) -> None:
        if rank.number == 1:
            raise ValueError("on purpose")
        for _ in range(3):
            torch.distributed.barrier()

    began = time.monotonic()
    with pytest.raises(RanksFailed) as raised:
        on_threads(second_raises, ranks=3)
    assert time.monotonic() - began < 10
    assert raised.value.rank == 1
    assert str(raised.value).startswith("rank 1 of 3 (threads) raised ValueError: on purpose")
    assert "rank 0: waited for the others, and was released" in str(raised.value)
    assert on_threads(lambda rank: rank.number) == [0, 1]


def test_a_thread_that_raises_releases_those_that_make_a_group():
    def second_raises(rank: Rank) -> None:
        if rank.number == 1:
            raise ValueError("on purpose")
        torch.distributed.new_group([0, 1])

    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 \(threads\) raised ValueError"):
        on_threads(second_raises)
    assert time.monotonic() - began < 9  # torch's own wait wakes up after ten seconds


def test_ranks_that_wait_for_each_other_are_all_named():
    def different(rank: Rank) -> None:
        if rank.number == 0:
            torch.distributed.barrier()

    with pytest.raises(RanksFailed, match=r"rank.* of 2 \(threads\) did not end within 0.5 s"):
        # The second rank's last barrier and the first one's barrier are one, so the first waits in its last for ever.
        on_threads(different, timeout=0.5)


def test_a_thread_that_hangs_is_reported_with_its_stack_and_later_runs_fail_while_it_is_there(monkeypatch):
    monkeypatch.setattr(threads, "GRACE", 0.3)
    awake = threading.Event()

    def sleep_in_one(rank: Rank) -> None:
        if rank.number == 1:
            awake.wait(60)
        torch.distributed.barrier()

    try:
        with pytest.raises(RanksFailed) as raised:
            on_threads(sleep_in_one, ranks=3, timeout=0.5)
        text = str(raised.value)
        first = "rank 1 of 3 (threads) did not end within 0.5 s; nothing can end a thread, and it still runs"
        assert text.startswith(first)
        assert "awake.wait(60)" in text
        assert text.count("torch.distributed.barrier()") == 2  # all stacks: the others' too
        with pytest.raises(RuntimeError, match=r"rank 1 of .*sleep_in_one of an earlier test still runs"):
            on_threads(lambda rank: None)
    finally:
        awake.set()
    assert on_threads(lambda rank: rank.number) == [0, 1]  # once it has ended


@pytest.mark.parametrize("skip", [pytest.skip.Exception, unittest.SkipTest])
def test_a_skip_in_a_thread_skips_the_test(skip):
    def skips(rank: Rank) -> None:
        if rank.number == 1:
            raise skip("not today")
        torch.distributed.barrier()

    with pytest.raises(unittest.SkipTest, match=r"^not today$"):
        on_threads(skips)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="1 thread or more"):
        on_threads(print, ranks=0)
    with pytest.raises(ValueError, match="seconds, more than 0"):
        on_threads(print, timeout=-1)
    with pytest.raises(ValueError, match="one backend, 'threaded'"):
        on_threads(print, backend="gloo")


def test_a_run_inside_a_rank_is_refused():
    with pytest.raises(RanksFailed, match="RuntimeError: on_threads was called inside a rank"):
        on_threads(lambda rank: on_threads(print), ranks=1)


def test_without_torch_s_group_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, threaded_group.GROUP, None)
    with pytest.raises(unittest.SkipTest, match=r"has no usable torch\.testing\._internal.*run the test in processes"):
        on_threads(print)
    assert on_threads(lambda rank: rank.number, comms=False) == [0, 1]


def test_seeded_ranks_draw_the_same():
    def draw(rank: Rank) -> list[float]:
        with rank.seeded(3):
            return [torch.rand(1).item() for _ in range(200)]

    results = on_threads(draw, ranks=4, comms=False)
    assert results == [results[0]] * 4
