"""In this folder operators that would gather raise: its tests ask what works on parts. Some tests let them gather."""

import pytest


@pytest.fixture(autouse=True)
def only_parts(gathers_are_errors: None) -> None:
    """For all tests."""
