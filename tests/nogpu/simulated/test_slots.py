"""The models of ``testing.models`` on slots other than the first devices in their order."""

import pytest
import torch

from dataparallel.testing import parity
from dataparallel.testing.cases import Case
from dataparallel.testing.models import CASES
from selection import others_long

pytestmark = [
    pytest.mark.devices("sim"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
PERTURBATION = parity.Perturbation(seed=5, scale=0.5)

ARRANGEMENTS = {
    "two slots on each device": [0, 0, 1, 1, 2, 2],
    "one device shared by some": [1, 0, 1],
    "reversed": [7, 6, 5, 4, 3, 2, 1, 0],
    "not from 0": [3, 5],
    "all on one that is not the first": [2, 2, 2],
}
SHORT = [ARRANGEMENTS["one device shared by some"]]


@pytest.mark.parametrize("indices", others_long(ARRANGEMENTS.values(), SHORT), ids=ARRANGEMENTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_equals_one_device(case: Case, indices: list[int]) -> None:
    slots = [torch.device("sim", index) for index in indices]
    for size in (2 * len(slots) + 1, len(slots) - 1):
        batch = case.batch(size, size)
        parity.assert_same_step(case.build, batch, slots, dim=case.dim, by_chunks=case.by_chunks)
        parity.assert_same_step(case.build, batch, slots, dim=case.dim, perturbation=PERTURBATION)
    assert torch.accelerator.current_device_index() == 0
