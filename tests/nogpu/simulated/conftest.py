"""Fixtures that several files of this folder use."""

from collections.abc import Callable, Iterator

import pytest
import torch

from processes import Ahead, attempt


@pytest.fixture
def capacity() -> Iterator[Callable[[int, torch.device], None]]:
    """A function that limits a device to a number of bytes, until the test ends."""
    limited = []

    def limit(size: int, device: torch.device) -> None:
        limited.append(device)
        torch.sim.set_memory_capacity(size, device)

    yield limit
    for device in limited:
        torch.sim.set_memory_capacity(None, device)


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    attempt()
    with Ahead(request, tmp_path_factory.mktemp("ahead")) as ahead:
        yield ahead
