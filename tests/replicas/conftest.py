"""A net with its samples."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nets import Net, build, forget, samples


@pytest.fixture(autouse=True)
def nothing_asked_or_held() -> Iterator[None]:
    yield
    forget()


@pytest.fixture
def net(root: torch.device) -> Net:
    return build(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return samples(root)
