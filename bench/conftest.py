"""Hooks of the benchmark: one report per run of pytest, printed at its end and written to files.

`DATAPARALLEL_BENCH_SHORT=1` shortens everything, `DATAPARALLEL_BENCH_RESULTS=DIR` writes to `DIR`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from throughput_report import Report

REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report("digits")
    # Operators this small gain little from a second intra-op thread (a fifth of an epoch's time on
    # an idle machine), and lose a lot to it where other programs want the cores: each operator
    # waits until both threads have had their turn.
    torch.set_num_threads(1)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """What the terminal and `bench/results` will show."""
    return request.config.stash[REPORT]


@pytest.fixture(scope="session")
def short() -> bool:
    """Whether to be quick rather than meaningful."""
    return is_short()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not report.rows and not report.notes:
        return
    terminalreporter.section(report.name)
    terminalreporter.write_line(report.text())
    if not report.rows:
        return
    if exitstatus != pytest.ExitCode.OK:
        terminalreporter.write_line("not written to files: not every test has passed")
        return
    directory = results_directory()
    report.write(directory)
    terminalreporter.write_line(f"table and plot: {directory}")


def is_short() -> bool:
    return os.environ.get("DATAPARALLEL_BENCH_SHORT", "0") not in ("", "0")


def results_directory() -> Path:
    """`bench/results`, but short runs must not replace what a full run has measured."""
    if directory := os.environ.get("DATAPARALLEL_BENCH_RESULTS"):
        return Path(directory)
    if is_short():
        return Path(tempfile.mkdtemp(prefix="dataparallel-bench-"))
    return Path(__file__).parent / "results"
