"""Comparisons of steps notice what matters, and say where."""

import dataclasses

import pytest
from torch import nn

from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import (
    StepResults,
    assert_steps_match,
    run_step,
)


@pytest.fixture
def step() -> StepResults:
    return run_step(seeded(nn.Linear, 6, 3)(), numbers(6)(4, 0))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: None, r"gradients\['weight'\] is None"),
        (lambda weight: weight.to_sparse(), r"gradients\['weight'\] is torch.sparse_coo"),
        (lambda weight: weight + 2e-9, r"gradients\['weight'\]: .*not close"),
        (lambda weight: weight.float(), r"gradients\['weight'\]: .*dtype"),
    ],
    ids=["missing", "sparse", "2e-9", "dtype"],
)
def test_a_difference_is_named(step: StepResults, change, message: str) -> None:
    gradients = {**step.gradients, "weight": change(step.gradients["weight"])}
    other = dataclasses.replace(step, gradients=gradients)
    with pytest.raises(AssertionError, match=message):
        assert_steps_match(other, step)
