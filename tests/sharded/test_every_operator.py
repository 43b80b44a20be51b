"""Every operator that torch tests works on sharded tensors as on plain ones or is refused: none is silently wrong."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from zlib import crc32

import pytest
import torch

from dataparallel.sharded.placements import over_of
from dataparallel.testing.sharding import Checked
from every_operator import COMMON, PLACEMENTS, Outcomes, outcomes
from fake_machines import FakeOver, on_fake_machines, owners_of
from swept_operators import RANKS, checked, on_sharded_tensors, swept

pytestmark = pytest.mark.long

OnOwners = Callable[[Callable[[Any], list[Outcomes]]], list[list[Outcomes]]]

PARTS = 12
# The bounds below leave room. With torch 2.13 the smallest are 18 and 25, of gradients 12 and 24, on devices 15 and 21.

FEW = dict.fromkeys(PLACEMENTS.values(), 3)
SAMPLES = {PLACEMENTS["rows"]: 10, PLACEMENTS["last"]: 4, PLACEMENTS["replicated"]: 4}
"""For each operator and dtype, most for what `fully_shard` cuts; over machines `FEW`."""


@pytest.fixture(autouse=True)
def samples_warn() -> Iterator[None]:
    """torch's samples are made with functions that warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(
    on_owners: OnOwners, samples: Mapping[Any, int], requires_grad: bool, right: int, refused: int, **which: Any
) -> None:
    """Nothing is wrong with any placement, and as many operators at least were right and refused."""

    def sweep(owners: Any) -> list[Outcomes]:
        wanted = samples if over_of(owners) is None else FEW
        return outcomes(owners, wanted, requires_grad=requires_grad, **which)

    for all_found in on_owners(sweep):
        for found in all_found:
            print(found)
            assert found.wrong == {}
            assert len(found.right) >= right, str(found)
            assert len(found.refused) >= refused, str(found)


def part(number: int) -> Callable[[str], bool]:
    """One of `PARTS` parts of the operators, so that no test takes too long."""
    return lambda name: crc32(name.encode()) % PARTS == number


@pytest.mark.slots(4)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_common_ones_are_right_or_refused(on_owners: OnOwners, requires_grad: bool) -> None:
    check(on_owners, FEW, requires_grad, 22, 15, dtypes=[torch.float64], chosen=COMMON.__contains__)


@pytest.mark.devices("cpu")
@pytest.mark.slots(4)
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused(on_owners: OnOwners, number: int) -> None:
    dtypes = [torch.float64, torch.int64, torch.complex128]
    check(on_owners, SAMPLES, False, 14, 20, dtypes=dtypes, chosen=part(number))


@pytest.mark.devices("cpu")
@pytest.mark.slots(4)
@pytest.mark.parametrize("number", range(PARTS))
def test_gradients_of_every_one_are_right_or_refused(on_owners: OnOwners, number: int) -> None:
    check(on_owners, SAMPLES, True, 9, 19, dtypes=[torch.float64, torch.complex128], chosen=part(number))


@pytest.mark.devices("sim")
@pytest.mark.parametrize("number", range(PARTS))
def test_every_one_is_right_or_refused_on_devices(slots: list, number: int) -> None:
    samples = {PLACEMENTS["rows"]: 2}
    check(lambda sweep: [sweep(slots)], samples, False, 11, 16, dtypes=[torch.float64], chosen=part(number))


@pytest.mark.slots(RANKS)
@pytest.mark.parametrize("machines", [2, 4])
def test_those_of_the_manual_do_over_machines_what_they_do_on_one(slots: list, machines: int) -> None:
    def sweep(over: FakeOver) -> dict[str, Checked]:
        return {one.name: checked(one, owners_of(slots, over)) for one in swept()}

    expected = on_sharded_tensors(slots)
    for found in on_fake_machines(sweep, machines):
        for name, counts in found.items():
            assert (counts.right, counts.refused, counts.wrong) == (expected[name].right, expected[name].refused, 0), (
                name
            )
