"""What tests of gangs share: a gang's values, and the worker threads."""

from collections.abc import Callable
from typing import Any

import pytest

from dataparallel.threads import pool
from dataparallel.threads.gang import Gang, SerialTasks


def values(tasks: list[Callable[[], Any]], permits: int, groups: list | None = None) -> list[Any]:
    return values_of(Gang(tasks, permits, groups))


def values_of(tasks: Gang | SerialTasks) -> list[Any]:
    """What the tasks returned; the first error is raised."""
    outcomes = tasks.run_tasks()
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def forget_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends there are no idle threads.

    They belong to the process. The library forgets them in forked children only, so this has no public name.
    """
    monkeypatch.setattr(pool, "_idle", {})
