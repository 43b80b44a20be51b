"""Tensors of replicas that stay: one kept broadcast, in every graph, with the source's values at every forward."""

import functools

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable.living_replicas import LivingReplicas
from dataparallel.testing.models import CASES
from dataparallel.testing.parity import assert_same_step, assert_same_training

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def living(module: nn.Module, slots: list, dim: int = 0, first: int = 64, cap: int = 256) -> DataParallel:
    """The wrapper, with replicas that stay; buckets of a few parameters."""
    wrapped = DataParallel(module, slots, dim=dim)
    wrapped._kept = LivingReplicas([torch.device(slot) for slot in slots], first, cap, broadcast_buffers=True)
    return wrapped


@pytest.mark.slots(2, 3, 8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_step_is_that_of_one_device(case, slots):
    size = 3 * len(slots) + 1
    assert_same_step(case.build, case.batch(size, size), slots, dim=case.dim, by_chunks=case.by_chunks, wrap=living)


@pytest.mark.slots(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_that_of_one_device(case, slots):
    assert_same_training(
        case.build,
        [case.batch(7, step) for step in range(4)],
        slots,
        dim=case.dim,
        optimizer=case.optimizer,
        by_chunks=case.by_chunks,
        wrap=living,
    )
