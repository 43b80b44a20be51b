"""A pytest plugin: fixtures that run a function of a test in ranks.

In the ``conftest.py`` beside your pytest configuration::

    pytest_plugins = ["dataparallel.testing.pytest"]

`on_slots`, `on_threads` and `on_processes` are functions that run a function of a test in ranks::

    def sums(rank, x):
        x = x * rank.number
        torch.distributed.all_reduce(x)
        return x

    def test_sums(on_processes):
        assert on_processes(sums, torch.ones(2), ranks=3)[0].tolist() == [3, 3]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["on_processes", "on_slots", "on_threads"]


@pytest.fixture
def on_processes() -> Callable[..., list[Any]]:
    """Runs a function in processes, one for each rank: see `dataparallel.testing.ranks.on_processes`."""
    from dataparallel.testing import ranks

    return ranks.on_processes


@pytest.fixture
def on_threads() -> Callable[..., list[Any]]:
    """Runs a function in threads, one for each rank: see `dataparallel.testing.ranks.on_threads`."""
    from dataparallel.testing import ranks

    return ranks.on_threads


@pytest.fixture
def on_slots() -> Callable[..., list[Any]]:
    """Runs a function once with the devices of several slots: see `dataparallel.testing.ranks.on_slots`."""
    from dataparallel.testing import ranks

    return ranks.on_slots
