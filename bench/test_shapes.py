"""The models have the shapes that the reports state, and the published numbers of parameters. Nothing is timed here."""

from __future__ import annotations

import pytest
import torch

from shapes import REAL_SHAPES, SHAPES, RealShape, Shape

META = torch.device("meta")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_numbers_of_modules_parameters_and_buffers(shape: Shape) -> None:
    model = shape.model()
    assert len(list(model.modules())) == shape.modules
    assert len(list(model.parameters())) == shape.parameters
    assert len(list(model.buffers())) == shape.buffers


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape.name)
def test_a_step_of_real_size_has_one_loss_and_a_gradient_for_each_parameter(shape: RealShape) -> None:
    model = shape.model(META)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    inputs, targets = shape.batch(1)
    loss = model(inputs.to(META), targets.to(META))
    assert loss.shape == (1,)
    loss.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
