"""The models have the shapes that the reports state. Nothing is timed here."""

from __future__ import annotations

import pytest

from shapes import NARROW_BERT, NARROW_GPT, RESNET, WIDE_GPT, Shape


@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, NARROW_BERT, WIDE_GPT], ids=lambda shape: shape.name)
def test_numbers_of_modules_parameters_and_buffers(shape: Shape) -> None:
    model = shape.model()
    assert len(list(model.modules())) == shape.modules
    assert len(list(model.parameters())) == shape.parameters
    assert len(list(model.buffers())) == shape.buffers
