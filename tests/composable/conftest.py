"""Modules on the first slot that the tests of this folder share."""

import pytest
import torch
from counting import Counts
from persistent import Net, build
from torch import Tensor


@pytest.fixture
def net(root: torch.device) -> Net:
    return build(root)


@pytest.fixture
def twin(root: torch.device) -> Net:
    """The same as `net`, for one device."""
    return build(root)


@pytest.fixture
def counts(root: torch.device) -> Counts:
    torch.manual_seed(0)
    return Counts().double().to(root)


@pytest.fixture
def batch(root: torch.device) -> Tensor:
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(root)
