"""Sums that differ from those of plain copies are noticed, by numbers at the edges of each dtype."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from kernel_runner import Kernels, summing
from tensor_kinds import devices_of
from torch import Tensor

from dataparallel.comm.compare import AddUp, how_sums_differ
from dataparallel.comm.routes import STAR

CPUS = [torch.device("cpu")] * 3


def flushed(tensor: Tensor) -> Tensor:
    small = tensor.abs() < torch.finfo(tensor.dtype).smallest_normal
    return torch.where(small, torch.copysign(torch.zeros_like(tensor), tensor), tensor)


def flushing_terms(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    return STAR.add_up([flushed(flat) for flat in flats], destination)


def flushing_sums(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    return flushed(STAR.add_up(flats, destination))


def from_zero(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    return STAR.add_up([torch.zeros_like(flats[0]), *flats], destination)


def rounding_each_time(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    total = flats[0].to(destination)
    for flat in flats[1:]:
        total = total + flat.to(destination)
    return total


def without_infinities(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    return STAR.add_up(flats, destination).nan_to_num(nan=float("nan"))


def failing(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    raise RuntimeError("no link")


@pytest.mark.slots(2, 3, 8)
def test_plain_copies_sums_are_right_whatever_their_route(slots: list) -> None:
    assert how_sums_differ(STAR.add_up, devices_of(slots)) is None


@pytest.mark.slots(2, 3)
@pytest.mark.parametrize(
    ("add_up", "why"),
    [
        (flushing_terms, "it has made 0.0 of"),
        (flushing_sums, "it has made 0.0 of"),
        (from_zero, "it has made 0.0 of -0.0"),
        (without_infinities, "which are inf"),
        (failing, "it has failed to add: no link"),
    ],
)
def test_other_sums_are_told_by_an_example(add_up: AddUp, why: str, slots: list) -> None:
    assert why in str(how_sums_differ(add_up, devices_of(slots)))


@pytest.mark.slots(3)
def test_halves_that_are_rounded_each_time_are_found_out(slots: list) -> None:
    assert "in torch.float16 it has made" in str(how_sums_differ(rounding_each_time, devices_of(slots)))


@pytest.mark.slots(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_is_tried(dtype: torch.dtype, slots: list) -> None:
    def add_up(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
        return (flushing_terms if flats[0].dtype == dtype else STAR.add_up)(flats, destination)

    assert f"in {dtype} it has made" in str(how_sums_differ(add_up, devices_of(slots)))


@pytest.fixture
def flush() -> Iterator[None]:
    """Arithmetic of this thread takes subnormals for zeros."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no mode that flushes subnormals")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.devices("cpu")
@pytest.mark.usefixtures("flush")
def test_the_kernels_are_right_unless_they_flush(kernels: Kernels) -> None:
    """The kernels are compiled for the CPU. Its flush mode has the effect of the compiler's option on a GPU."""

    def add_up(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
        total = torch.empty_like(flats[0], device=destination)
        kernels.run(summing([[flat] for flat in flats], [total], max_blocks=4))
        return total

    def add_up_flushing(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
        torch.set_flush_denormal(True)
        try:
            return add_up(flats, destination)
        finally:
            torch.set_flush_denormal(False)

    assert how_sums_differ(add_up, CPUS) is None
    assert "in torch.float32 it has made" in str(how_sums_differ(add_up_flushing, CPUS))
