"""Comparisons of steps notice what matters, and say where."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import (
    StepResults,
    assert_steps_match,
    chunks,
    concatenate,
    mean_square_loss,
    run_step,
)


@pytest.fixture
def step() -> StepResults:
    return run_step(seeded(nn.Linear, 6, 3)(), numbers(6)(4, 0))


def test_a_step_has_gradients_of_parameters_and_inputs(step: StepResults) -> None:
    assert sorted(step.gradients) == ["bias", "weight"]
    assert [gradient.shape for gradient in step.input_gradients] == [(4, 6)]
    assert step.output.grad_fn is None
    assert_steps_match(step, step)


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


def test_another_structure_is_a_difference(step: StepResults) -> None:
    with pytest.raises(AssertionError, match="output is"):
        assert_steps_match(dataclasses.replace(step, output=[step.output]), step)


def test_chunks_are_those_of_torch_chunk() -> None:
    batch = ((torch.arange(5), torch.tensor(7)), {"scale": 2})
    parts = chunks(batch, 4, 0)
    assert [args[0].tolist() for args, _ in parts] == [[0, 1], [2, 3], [4]]
    assert all(args[1] == 7 and kwargs == {"scale": 2} for args, kwargs in parts)
    joined = concatenate([args for args, _ in parts], 0)
    assert joined[0].tolist() == [0, 1, 2, 3, 4]
    assert joined[1].tolist() == [7, 7, 7]


def test_the_loss_notices_the_order_of_samples() -> None:
    output = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss: Tensor = mean_square_loss({"a": output, "b": [output.to(torch.complex128), "text"]})
    assert loss.dim() == 0
    assert loss.dtype == torch.float64
    assert mean_square_loss(output) != mean_square_loss(output.flip(0))
