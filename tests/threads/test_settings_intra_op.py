"""Replicas on CPU slots divide the caller's intra-op threads among them; afterwards everything is as it was."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataparallel import DataParallel
from probe import Probe, intra_op_threads

pytestmark = pytest.mark.devices("cpu")

CPU = ["cpu"] * 3


def in_a_fresh_thread(read: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def seen(slots: list, recording: bool = False, **options: Any) -> set[int]:
    """The numbers that replicas see."""
    probe = Probe(torch.get_num_threads)
    probe.eval()
    with torch.set_grad_enabled(recording):
        DataParallel(probe, slots, **options)(torch.zeros(2 * len(slots), 2, device=slots[0]))
    return set(probe.seen)


@pytest.mark.parametrize(
    ("number", "workers", "each"), [(6, 3, 2), (6, 2, 3), (6, 1, 6), (7, 3, 2), (2, 3, 1), (1, 3, 1)]
)
def test_those_that_run_at_the_same_time_divide_them(number: int, workers: int | None, each: int) -> None:
    with intra_op_threads(number):
        assert seen(CPU, workers=workers) == {each}
        assert torch.get_num_threads() == number
        assert in_a_fresh_thread(torch.get_num_threads) == number


def mkl_threads() -> int:
    """The number that MKL uses. It has its own."""
    return int(re.findall(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())[0])


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_mkl_follows() -> None:
    probe = Probe(mkl_threads).eval()
    with intra_op_threads(6), torch.no_grad():
        for _ in range(3):
            DataParallel(probe, CPU, workers=3)(torch.zeros(6, 2))
            assert mkl_threads() == 6
    assert set(probe.seen) == {2}


def test_replicas_that_run_one_after_the_other_have_all() -> None:
    with intra_op_threads(6):
        assert seen(CPU, recording=True) == {6}
        assert seen(CPU, serial=True) == {6}


@pytest.mark.devices("sim", "cuda")
def test_on_accelerators_each_has_the_callers_number(slots: list) -> None:
    with intra_op_threads(6):
        assert seen(slots) == {6}


def test_what_a_replica_sets_is_gone_afterwards_also_if_it_fails() -> None:
    def set_and_fail() -> None:
        torch.set_num_threads(5)
        raise ValueError("as asked")

    with intra_op_threads(6):
        with torch.no_grad(), pytest.raises(ValueError, match="as asked"):
            DataParallel(Probe(set_and_fail), CPU, workers=3)(torch.zeros(6, 2))
        assert torch.get_num_threads() == in_a_fresh_thread(torch.get_num_threads) == 6
        assert seen(CPU, workers=3) == {2}
