"""The models for predictions have the published numbers of parameters. Nothing is computed or timed here."""

from __future__ import annotations

import pytest
import torch

from real_shapes import REAL_SHAPES, RealShape

META = torch.device("meta")

each_shape = pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape.name)


@each_shape
def test_number_of_parameters(shape: RealShape) -> None:
    assert sum(parameter.numel() for parameter in shape.model(META).parameters()) == shape.parameters


@each_shape
def test_a_step_has_one_loss_and_a_gradient_for_each_parameter(shape: RealShape) -> None:
    model = shape.model(META)
    inputs, targets = shape.batch(1)
    loss = model(inputs.to(META), targets.to(META))
    assert loss.shape == (1,)
    loss.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "pooler" not in name)


@each_shape
def test_each_device_gets_its_samples(shape: RealShape) -> None:
    inputs, targets = shape.batch(2)
    assert len(inputs) == len(targets) == 2 * shape.samples
