"""What tests need that run scripts in processes of their own, most of them with simulated accelerators."""

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
from dataparallel.testing import ToolsMissing, simulate
try:
    simulate(1)
except ToolsMissing as error:
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
    """Runs a Python script to its end."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=timeout, check=False
    )


def run_script(script: str, *arguments: str, timeout: float = 60, **changes: str) -> str:
    """What a Python script prints, which has to end well and in time."""
    done = run(script, *arguments, timeout=timeout, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def _attempt() -> subprocess.CompletedProcess:
    return run(TRY, timeout=600)


def skip_without_tools() -> None:
    """For a fixture of module scope: what is compiled there is not on the watchdog's time.

    Anything but missing tools, a compiler that refuses for one, is an error of the fixture.
    """
    done = _attempt()
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout:
        pytest.skip(done.stdout.strip())
