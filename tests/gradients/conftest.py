"""The model and the batch that most tests of this folder use."""

import pytest
import torch
from persistent import Branched, build
from torch import Tensor

from nets import samples


@pytest.fixture
def net(root: torch.device) -> Branched:
    return build(root)


@pytest.fixture
def twin(root: torch.device) -> Branched:
    """The same as `net`, for one device."""
    return build(root)


@pytest.fixture
def batch(root: torch.device) -> Tensor:
    return samples(root)
