"""Processes of tests that have no simulated devices before."""

from collections.abc import Iterator

import pytest

from processes import Ahead, attempt


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    attempt()
    with Ahead(request, tmp_path_factory.mktemp("ahead")) as ahead:
        yield ahead
