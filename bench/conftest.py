"""Hooks of the benchmarks: which devices, and a report per file, printed at the end and written to files.

`DATAPARALLEL_BENCH_SHORT=1` shortens everything, `DATAPARALLEL_BENCH_RESULTS=DIR` writes to `DIR`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from places import Places, find_places
from reporting import Report

REPORTS = pytest.StashKey[list[Report]]()
PLACES = pytest.StashKey[Places]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORTS] = []
    # Operators this small gain little from a second intra-op thread (a fifth of an epoch's time on
    # an idle machine), and lose a lot to it where other programs want the cores: each operator
    # waits until both threads have had their turn. The autograd engine's threads take the setting
    # when they are made, so it comes before anything that runs a backward.
    torch.set_num_threads(1)
    config.stash[PLACES] = find_places()


@pytest.fixture(scope="session")
def places(request: pytest.FixtureRequest) -> Places:
    """The devices to measure on."""
    return request.config.stash[PLACES]


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> list[Report]:
    """What the terminal and `bench/results` will show: each file of benchmarks adds its own."""
    return request.config.stash[REPORTS]


@pytest.fixture(scope="session")
def short() -> bool:
    """Whether to be quick rather than meaningful."""
    return is_short()


@pytest.fixture(autouse=True)
def nothing_freed_too_early(places: Places) -> Iterator[None]:
    """What the simulated devices' clocks find when memory is freed belongs to the test that caused it."""
    yield
    if places.simulated:
        torch.sim.check_clocks()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    reports = [report for report in config.stash[REPORTS] if report.rows or report.notes]
    for report in reports:
        terminalreporter.section(report.name)
        terminalreporter.write_line(report.text())
    measured = [report for report in reports if report.rows]
    if not measured:
        return
    if exitstatus != pytest.ExitCode.OK:
        terminalreporter.write_line("not written to files: not every test has passed")
        return
    directory = results_directory()
    for report in measured:
        report.write(directory)
    terminalreporter.write_line(f"tables and plots: {directory}")


def is_short() -> bool:
    return os.environ.get("DATAPARALLEL_BENCH_SHORT", "0") not in ("", "0")


def results_directory() -> Path:
    """`bench/results`, but short runs must not replace what a full run has measured."""
    if directory := os.environ.get("DATAPARALLEL_BENCH_RESULTS"):
        return Path(directory)
    if is_short():
        return Path(tempfile.mkdtemp(prefix="dataparallel-bench-"))
    return Path(__file__).parent / "results"
