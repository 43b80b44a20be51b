"""What tests of simulated accelerators need that run them in processes of their own."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dataparallel
from dataparallel.testing.simulated import build

CACHE = str(build._cache())  # before a test moves HOME or the variable

TRY = """
from dataparallel.testing import SimulationUnavailable, simulate
try:
    simulate(1)
except SimulationUnavailable as error:
    print(error)
"""


def environment(**changes: str) -> dict[str, str]:
    """The variables for a process that imports this package and finds the accelerators compiled."""
    paths = [str(Path(dataparallel.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_EXTENSIONS_DIR": CACHE,
        **changes,
    }


def run(script: str, *arguments: str, timeout: float = 60, **changes: str) -> subprocess.CompletedProcess:
    """Runs a Python script to its end, in a process of its own."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=timeout, check=False
    )


def succeed(script: str, *arguments: str, **changes: str) -> str:
    """What a Python script prints, which has to end well."""
    done = run(script, *arguments, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def _why_not() -> str:
    done = run(TRY, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def skip_if_unavailable() -> None:
    """For a fixture of module scope: what is compiled there is not on the watchdog's time."""
    if _why_not():
        pytest.skip(_why_not())
