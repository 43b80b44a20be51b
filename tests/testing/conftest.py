"""Fixtures that several files of this folder use; those of the plugin run a function in several ranks."""

import pytest

from dataparallel.testing.pytest import on_processes, on_slots, on_threads  # noqa: F401
from processes import skip_without_tools


@pytest.fixture(scope="module")
def available() -> None:
    """The simulated accelerators can be compiled, or the test is skipped."""
    skip_without_tools()
