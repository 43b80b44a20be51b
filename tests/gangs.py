"""What several tests of workers need: a gang's values, and its threads."""

import threading
from collections.abc import Callable
from typing import Any

from dataparallel.threads.gang import Gang


def values(tasks: list[Callable[[], Any]], permits: int, turns: list | None = None) -> list[Any]:
    """What the tasks returned; the first error is raised."""
    outcomes = Gang(tasks, permits, turns).run()
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("dataparallel-worker")}
