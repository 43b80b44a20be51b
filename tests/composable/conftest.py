"""Modules on the first slot, and a batch, for the tests of this folder."""

import pytest
import torch
from persistent import Branched, build
from torch import Tensor

from affine import Affine, build_affine
from nets import samples


@pytest.fixture
def net(root: torch.device) -> Branched:
    return build(root)


@pytest.fixture
def twin(root: torch.device) -> Branched:
    """The same as `net`, for one device."""
    return build(root)


@pytest.fixture
def affine(root: torch.device) -> Affine:
    return build_affine(root)


@pytest.fixture
def batch(root: torch.device) -> Tensor:
    return samples(root)
