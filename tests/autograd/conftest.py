"""The tensors of a bucket, for the tests of its nodes."""

import pytest
import torch
from torch import Tensor

SHAPES = [(3,), (2, 4), (), (3,), (4, 2, 3, 3)]


@pytest.fixture
def sources(root: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(root) for shape in SHAPES]
    tensors[-1] = tensors[-1].contiguous(memory_format=torch.channels_last)
    return [tensor.requires_grad_() for tensor in tensors]
