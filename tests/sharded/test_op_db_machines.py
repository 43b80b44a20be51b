"""Every operator that torch tests works over machines as on plain tensors or is refused, on all machines alike."""

import warnings
from collections.abc import Callable, Iterator
from zlib import crc32

import pytest
import torch

from every_operator import COMMON, PLACEMENTS, Outcomes, outcomes
from fake_machines import FakeOver, on_fake_machines, owners_of

pytestmark = pytest.mark.slots(4)


@pytest.fixture(autouse=True)
def samples_warn(one_intra_op_thread: None) -> Iterator[None]:
    """torch's samples are made with functions that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(
    slots: list, chosen: Callable[[str], bool], dtypes: list[torch.dtype], requires_grad: bool, *, right: int
) -> None:
    """Nothing is wrong with any placement, and as many operators at least were right."""

    def sweep(over: FakeOver) -> list[Outcomes]:
        owners, samples = owners_of(slots, over), dict.fromkeys(PLACEMENTS.values(), 3)
        return outcomes(owners, samples, dtypes=dtypes, requires_grad=requires_grad, chosen=chosen)

    for all_found in on_fake_machines(sweep):
        for found in all_found:
            print(found)
            assert found.wrong == {}
            assert len(found.right) >= right, str(found)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_common_ones_are_right_or_refused(slots: list, requires_grad: bool) -> None:
    check(slots, COMMON.__contains__, [torch.float64], requires_grad, right=22)


PARTS = 12


def part(number: int) -> Callable[[str], bool]:
    """One of `PARTS` parts of the operators, so that no test takes too long."""
    return lambda name: crc32(name.encode()) % PARTS == number


@pytest.mark.long
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused(slots: list, number: int) -> None:
    check(slots, part(number), [torch.float64, torch.int64, torch.complex128], False, right=14)


@pytest.mark.long
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("number", range(PARTS))
def test_gradients_of_every_one_are_right_or_refused(slots: list, number: int) -> None:
    check(slots, part(number), [torch.float64, torch.complex128], True, right=9)
