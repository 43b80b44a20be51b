"""Training on slots equals training on one device, for every model of the zoo, in float64.

Not here: what single stages promise. Those tests stand beside their stage.
"""

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.testing import parity, steps
from dataparallel.testing.cases import Case, seeded, tokens
from dataparallel.testing.models import CASES, DROPOUT_CASES

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
PERTURBATION = parity.Perturbation(seed=1, scale=0.1)


def batch_sizes(slots: int) -> list[int]:
    """One that divides, one that does not, one smaller than the number of slots, and 1."""
    return sorted({2 * slots, 2 * slots + 1, slots - 1, 1})


@pytest.mark.slots(3, long=[2, 4, 8])
@every_case
def test_step_equals_one_device(case: Case, slots: list) -> None:
    for size in batch_sizes(len(slots)):
        batch = case.batch(size, size)
        parity.assert_same_step(case.build, batch, slots, dim=case.dim, by_chunks=case.by_chunks)


@pytest.mark.slots(3, long=[8])
@every_case
def test_twenty_optimizer_steps_equal_one_device(case: Case, slots: list) -> None:
    sizes = batch_sizes(len(slots))
    parity.assert_same_training(
        case.build,
        [case.batch(sizes[step % len(sizes)], step) for step in range(20)],
        slots,
        dim=case.dim,
        optimizer=case.optimizer,
        by_chunks=case.by_chunks,
    )


@every_case
def test_each_replica_computes_with_its_own_weights(case: Case, slots: list) -> None:
    for size in batch_sizes(len(slots)):
        parity.assert_same_step(case.build, case.batch(size, size), slots, dim=case.dim, perturbation=PERTURBATION)


@pytest.mark.slots(3, long=[8])
@pytest.mark.parametrize("case", DROPOUT_CASES, ids=lambda case: case.name)
def test_checkpointing_recomputes_with_the_same_dropout(case: Case, slots: list) -> None:
    assert case.twin is not None
    for size in batch_sizes(len(slots)):
        both = []
        for build in (case.build, case.twin):
            source = build().to(slots[0])
            parallel = DataParallel(source, slots, dim=case.dim)
            torch.manual_seed(size)
            both.append(steps.run_step(source, case.batch(size, size), call=parallel))
        steps.assert_steps_match(*both)


def test_sparse_adam_equals_one_device(slots: list) -> None:
    sparse_adam = torch.optim.SparseAdam
    parity.assert_same_training(
        seeded(nn.Embedding, 7, 4, sparse=True),
        [tokens(4, 7)(5, step) for step in range(20)],
        slots,
        optimizer=lambda parameters: sparse_adam(list(parameters), lr=1e-2),
    )
