"""In this folder operators that would gather raise: its tests ask what works on parts. Some tests let them gather."""

from collections.abc import Iterator

import pytest

from dataparallel.sharded import allow_gathers


@pytest.fixture(autouse=True)
def gathers_are_errors() -> Iterator[None]:
    allow_gathers(False)
    yield
    allow_gathers(None)


@pytest.fixture
def gathers(gathers_are_errors: None) -> None:
    """Operators may gather."""
    allow_gathers(True)
