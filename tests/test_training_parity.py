"""Training on slots equals training on one device, with both forms that replicate, for every model of the zoo.

In float64. Not here: what single stages promise, which is tested beside the stage, and models that are divided, which
are in forms/test_fully_shard_parity.
"""

from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.testing import parity, steps
from dataparallel.testing.cases import Case, seeded, tokens
from dataparallel.testing.models import CASES, DROPOUT_CASES

SCRIPTED = ("scripted", "traced")  # `replicate` refuses them
SMALL_BUCKETS = {"first_bucket_mb": 64 / 2**20, "bucket_cap_mb": 600 / 2**20}
EIGHT_SLOTS = (
    "mlp",
    "convnet_train",
    "sparse_embedding",
    "unused",
    "sometimes_used",
    "checkpoint_reentrant",
    "complex",
)
PERTURBATION = parity.Perturbation(seed=1, scale=0.1)


def in_place(module: nn.Module, slots: Any, dim: int = 0) -> nn.Module:
    return replicate(module, devices=slots, dim=dim)


def in_small_buckets(module: nn.Module, slots: Any, dim: int = 0) -> nn.Module:
    return replicate(module, devices=slots, dim=dim, **SMALL_BUCKETS)


def each_of(cases: list[Case], *wraps: Any) -> Any:
    runs = [(wrap, case) for wrap in wraps for case in cases if wrap is DataParallel or case.name not in SCRIPTED]
    return pytest.mark.parametrize(
        ("wrap", "case"), [pytest.param(wrap, case, id=f"{wrap.__name__}-{case.name}") for wrap, case in runs]
    )


def batch_sizes(slots: int) -> list[int]:
    """One that divides, one that does not, one smaller than the number of slots, and 1."""
    return sorted({2 * slots, 2 * slots + 1, slots - 1, 1})


@pytest.mark.few(24)
@pytest.mark.slots(3, long=[2, 4, 8])
@each_of(CASES, DataParallel, in_place)
def test_step_equals_one_device(wrap: Any, case: Case, slots: list) -> None:
    for size in batch_sizes(len(slots)):
        batch = case.batch(size, size)
        parity.assert_same_step(case.build, batch, slots, dim=case.dim, by_chunks=case.by_chunks, wrap=wrap)


@pytest.mark.few(6)
@pytest.mark.slots(3, long=[2, 8])
@each_of(CASES, DataParallel, in_small_buckets)
def test_twenty_optimizer_steps_equal_one_device(wrap: Any, case: Case, slots: list) -> None:
    if len(slots) == 8 and wrap is in_small_buckets and case.name not in EIGHT_SLOTS:
        pytest.skip("seen on two and three slots")
    sizes = batch_sizes(len(slots))
    parity.assert_same_training(
        case.build,
        [case.batch(sizes[step % len(sizes)], step) for step in range(20)],
        slots,
        dim=case.dim,
        optimizer=case.optimizer,
        by_chunks=case.by_chunks,
        wrap=wrap,
    )


@pytest.mark.few(12)
@each_of(CASES, DataParallel, in_place)
def test_each_replica_computes_with_its_own_weights(wrap: Any, case: Case, slots: list) -> None:
    for size in batch_sizes(len(slots)):
        batch = case.batch(size, size)
        parity.assert_same_step(case.build, batch, slots, dim=case.dim, perturbation=PERTURBATION, wrap=wrap)


@pytest.mark.slots(3, long=[8])
@each_of(DROPOUT_CASES, DataParallel, in_place)
def test_checkpointing_recomputes_with_the_same_dropout(wrap: Any, case: Case, slots: list) -> None:
    assert case.twin is not None
    for size in batch_sizes(len(slots)):
        both = []
        for build in (case.build, case.twin):
            source = build().to(slots[0])
            parallel = wrap(source, slots, dim=case.dim)
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
