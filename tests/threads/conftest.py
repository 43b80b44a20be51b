"""A machine with two cores, for the tests of permits."""

import os

import pytest

from dataparallel.threads import permits


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and a Python with a lock, whichever Python runs the test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(permits, "has_lock", lambda: True)
