"""Replicas on CPU slots divide the caller's intra-op threads among them; afterwards everything is as it was."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, parallel_apply
from dataparallel.threads.permits import cores
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


def test_without_a_number_of_workers_as_many_run_as_the_cores_allow() -> None:
    with intra_op_threads(6):
        assert seen(CPU) == {6 // min(cores(), len(CPU))}


def test_again_at_every_call() -> None:
    with intra_op_threads(6):
        for _ in range(3):
            assert seen(CPU, workers=3) == {2}
            assert seen(CPU, workers=1) == {6}


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


def test_more_workers_than_slots_do_not_count() -> None:
    with intra_op_threads(6):
        assert seen(CPU, workers=12) == {2}


def test_replicas_that_run_one_after_the_other_have_all() -> None:
    with intra_op_threads(6):
        assert seen(CPU, recording=True) == {6}
        assert seen(CPU, serial=True) == {6}


@pytest.mark.devices("sim", "cuda")
def test_on_accelerators_each_has_the_callers_number(slots: list) -> None:
    with intra_op_threads(6):
        assert seen(slots) == {6}


def test_in_a_call_without_a_wrapper() -> None:
    class Reads(nn.Module):
        def forward(self) -> int:
            return torch.get_num_threads()

    with intra_op_threads(6), torch.no_grad():
        assert parallel_apply([Reads().eval() for _ in CPU], [()] * 3, devices=CPU) == [2, 2, 2]
        assert torch.get_num_threads() == 6


def test_a_nested_call_divides_its_part() -> None:
    inner = Probe(torch.get_num_threads)
    model = DataParallel(nn.Sequential(DataParallel(inner, ["cpu"] * 2, workers=2)), ["cpu"] * 2, workers=2).eval()
    with intra_op_threads(8), torch.no_grad():
        model(torch.zeros(8, 1))
        assert inner.seen == [2] * 4
        assert torch.get_num_threads() == in_a_fresh_thread(torch.get_num_threads) == 8


def test_after_a_failure_everything_is_as_it_was_too() -> None:
    def fail() -> None:
        raise ValueError("as asked")

    with intra_op_threads(6):
        with torch.no_grad(), pytest.raises(ValueError, match="as asked"):
            DataParallel(Probe(fail), CPU, workers=3)(torch.zeros(6, 2))
        assert torch.get_num_threads() == in_a_fresh_thread(torch.get_num_threads) == 6


def test_what_a_replica_sets_itself_is_gone_afterwards() -> None:
    with intra_op_threads(6):
        with torch.no_grad():
            DataParallel(Probe(lambda: torch.set_num_threads(5)), CPU, workers=3)(torch.zeros(6, 2))
        assert torch.get_num_threads() == in_a_fresh_thread(torch.get_num_threads) == 6
        assert seen(CPU, workers=3) == {2}


def test_operators_give_the_same_numbers() -> None:
    x = torch.randn(6, 300, 40, generator=torch.Generator().manual_seed(0))

    class Matmul(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1).sum(2)

    with intra_op_threads(6), torch.no_grad():
        torch.testing.assert_close(DataParallel(Matmul(), CPU, workers=3)(x), Matmul()(x))
