"""Programs in processes of their own, which have no stand-in before."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import environment


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """A function that runs Python with these arguments in an empty folder."""
    (tmp_path / "here").mkdir()

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess:
        variables = environment(**changes)
        variables.pop("NOGPU_STAND_IN", None)
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=variables, cwd=tmp_path / "here", capture_output=True, text=True, timeout=900, check=False
        )

    return run


@pytest.fixture
def printed(python: Callable[..., subprocess.CompletedProcess]) -> Callable[..., str]:
    """As `python`, but returns what is printed, and fails if the program fails."""

    def run(*arguments: str, **changes: str) -> str:
        done = python(*arguments, **changes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
