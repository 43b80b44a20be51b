"""The stress test runs without a wrong bit, an error or a crash: for seconds, and for a long time.

`run_stress` runs in a process of its own, so that a crash is a failed test with the stacks of all threads. Builds of
Python without the lock are what it is for: `.ci/free-threaded` runs it there for longer.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.devices("cpu"), pytest.mark.long]  # each process makes its own devices

PROGRAM = Path(__file__).with_name("run_stress.py")
LONG = 1200.0  # seconds; two kinds make 40 minutes


def stress(kind: str, seconds: float) -> None:
    """Runs the program, and fails with what it has said."""
    command = [sys.executable, str(PROGRAM), f"--kind={kind}", f"--seconds={seconds}", "--threads=3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * seconds + 100)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-12000:]}"
    assert "rounds" in ended.stdout


@pytest.mark.watchdog(200)
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_for_seconds(kind: str) -> None:
    stress(kind, 5.0)


@pytest.mark.watchdog(3 * LONG)
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_for_long(kind: str) -> None:
    stress(kind, LONG)
