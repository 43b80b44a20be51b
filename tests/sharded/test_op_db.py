"""Every operator that torch tests works on sharded tensors as on plain ones or is refused: none is silently wrong."""

import warnings
from collections.abc import Callable, Iterator
from zlib import crc32

import pytest
import torch

from every_operator import COMMON, PLACEMENTS, Outcomes, outcomes


@pytest.fixture(autouse=True)
def samples_warn(one_intra_op_thread: None) -> Iterator[None]:
    """torch's samples are made with functions that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(all_found: list[Outcomes], right: int, refused: int) -> None:
    """Nothing is wrong with any placement, and as many operators at least were right and refused."""
    for found in all_found:
        print(found)
        assert found.wrong == {}
        assert len(found.right) >= right, str(found)
        assert len(found.refused) >= refused, str(found)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_common_ones_are_right_or_refused(slots: list, requires_grad: bool) -> None:
    found = outcomes(
        slots,
        dict.fromkeys(PLACEMENTS.values(), 3),
        dtypes=[torch.float64],
        requires_grad=requires_grad,
        chosen=COMMON.__contains__,
    )
    check(found, right=22, refused=15)


PARTS = 12
# The bounds below leave room. With torch 2.13 the smallest are 18 and 25, of gradients 12 and 24, on devices 15 and 21.


# For each operator and dtype, most for what `fully_shard` cuts.
SAMPLES = {PLACEMENTS["rows"]: 10, PLACEMENTS["last"]: 4, PLACEMENTS["replicated"]: 4}


def part(number: int) -> Callable[[str], bool]:
    """One of `PARTS` parts of the operators, so that no test takes too long."""
    return lambda name: crc32(name.encode()) % PARTS == number


@pytest.mark.long
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused(slots: list, number: int) -> None:
    dtypes = [torch.float64, torch.int64, torch.complex128]
    found = outcomes(slots, SAMPLES, dtypes=dtypes, requires_grad=False, chosen=part(number))
    check(found, right=14, refused=20)


@pytest.mark.long
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("number", range(PARTS))
def test_gradients_of_every_one_are_right_or_refused(slots: list, number: int) -> None:
    dtypes = [torch.float64, torch.complex128]
    found = outcomes(slots, SAMPLES, dtypes=dtypes, requires_grad=True, chosen=part(number))
    check(found, right=9, refused=19)


@pytest.mark.long
@pytest.mark.devices("sim")
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused_on_devices(slots: list, number: int) -> None:
    samples = {PLACEMENTS["rows"]: 2}
    found = outcomes(slots, samples, dtypes=[torch.float64], requires_grad=False, chosen=part(number))
    check(found, right=11, refused=16)
