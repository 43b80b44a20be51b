"""A machine with two cores, for the tests of permits."""

import os

import pytest

from dataparallel.threads import permit_numbers


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and a Python with a lock, whichever Python runs the test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(permit_numbers, "has_lock", lambda: True)


@pytest.fixture
def no_lock(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and a Python without a lock, whichever Python runs the test."""
    monkeypatch.setattr(permit_numbers, "has_lock", lambda: False)
