"""The ways to compile that each test of compiled replicas meets, and what was compiled meanwhile."""

from collections.abc import Callable, Iterator

import pytest
import torch

from compiled_nets import WAYS
from dataparallel import DataParallel
from dataparallel.compiled import FrameCounts, counts


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[..., DataParallel]:
    """A function from a module and slots to a wrapper whose replicas are compiled, wholly or in parts."""
    return request.param


@pytest.fixture(params=WAYS[:3], ids=lambda way: way.__name__)
def whole(request: pytest.FixtureRequest) -> Callable[..., DataParallel]:
    """The same, with one function for the whole model."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def since() -> Callable[[], FrameCounts]:
    """What has been compiled since the test began."""
    before = counts()
    return lambda: counts() - before
