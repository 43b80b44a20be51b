"""Runs a program of ``examples/`` as its reader would. What it prints is for the test to judge.

On a stand-in for CUDA the program sees the same devices as the test. It sees no simulated devices.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
SECONDS = 100
"""After which a program is taken for one that hangs."""

where_devices_are_seen = pytest.mark.devices("cpu", "cuda")


def variables() -> dict[str, str]:
    """The environment of every program."""
    return environment(OMP_NUM_THREADS="1")


def printed_by(name: str, folder: Path) -> list[str]:
    """The lines that the program prints, run in a folder. Fails if the program fails."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def numbers(line: str) -> list[float]:
    """Those in a line, without the signs around them. A colon ends what they are about."""
    words = line.rpartition(": ")[2].replace(",", "").replace("%", "").split()
    return [float(word) for word in words if word[0].isdigit()]
