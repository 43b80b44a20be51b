"""Models and batches for the tests of this folder. `pair` and `x` are for those of `fully_shard`."""

from typing import Any

import pytest
import torch
from kept import Branched, build
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


# `sharded_chains` is imported when a test asks for it: it imports more of torch than tests of other forms should see.


@pytest.fixture
def pair(slots: list) -> tuple[Any, Any]:
    """A chain that is fully sharded, and its twin on one device."""
    from sharded_chains import pair_on

    return pair_on(slots)


@pytest.fixture
def x(slots: list) -> Tensor:
    """A batch for `pair`, which does not divide evenly."""
    from sharded_chains import batch_on

    return batch_on(slots)
