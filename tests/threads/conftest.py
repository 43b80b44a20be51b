"""A machine with two cores, for the tests of permits."""

import pytest

from dataparallel.threads import permits


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    permits._ladder.cache_clear()
