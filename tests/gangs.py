"""What several tests of workers need: a gang's values, its threads, and a script of its own to run gangs in."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dataparallel
from dataparallel.workers import Gang


def values(tasks: list[Callable[[], Any]], permits: int, turns: list | None = None) -> list[Any]:
    """What the tasks returned; the first error is raised."""
    outcomes = Gang(tasks, permits, turns).run()
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("dataparallel-worker")}


def run_script(script: str, *arguments: str) -> str:
    """What a Python script prints in a process of its own, which has to end well and within a minute."""
    paths = [str(Path(dataparallel.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
