"""Hooks and fixtures of the benchmarks: options, devices, and a report for each file, printed at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from options import add_options, check_options, is_short, left_out, results_folder, shown
from places import Places, find_places
from reporting import Report

PLACES = pytest.StashKey[Places]()
REPORTS = pytest.StashKey[list[Report]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    check_options(config)
    config.stash[REPORTS] = []
    # Operators as small as these gain little from a second intra-op thread (a fifth of an epoch's time on an idle
    # machine). They lose a lot to it where other programs want the cores, because each operator waits for both threads.
    # The threads of the autograd engine take the setting when they are made, so it comes before the first backward.
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if left_out(collection_path, config) else None


def pytest_report_header(config: pytest.Config) -> str:
    which = "every suite" if config.getoption("all_suites") else "of a folder the main job only, --all for every suite"
    return f"benchmarks: {which}; results go to {shown(results_folder(config))}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Finds the devices before the first test. On first use on a machine they are compiled, and stderr says so."""
    if session.items and not session.config.option.collectonly:
        session.config.stash[PLACES] = find_places()


@pytest.fixture(scope="session")
def places(request: pytest.FixtureRequest) -> Places:
    """The devices to measure on."""
    return request.config.stash[PLACES]


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> list[Report]:
    """What will be printed and written at the end: each file of benchmarks adds its own."""
    return request.config.stash[REPORTS]


@pytest.fixture(scope="session")
def short(request: pytest.FixtureRequest) -> bool:
    """Whether to be quick rather than meaningful."""
    return is_short(request.config)


@pytest.fixture
def once(benchmark: BenchmarkFixture) -> Callable[..., Any]:
    """Calls a function, as one round of pytest-benchmark: its options and files know each comparison as a whole."""
    return lambda function, *args, **options: benchmark.pedantic(function, args, options, rounds=1)


@pytest.fixture(autouse=True)
def nothing_freed_too_early(places: Places) -> Iterator[None]:
    """What the clocks find when memory is freed belongs to the test that caused it."""
    yield
    if places.simulator is not None:
        places.simulator.check_clocks()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """After everything else that pytest prints, the tables come last."""
    yield
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    reports = [report for report in config.stash[REPORTS] if report.rows or report.notes]
    for report in reports:
        reporter.section(report.name)
        reporter.write_line(report.text())
    measured = [report for report in reports if report.rows]
    if not measured:
        return
    if session.exitstatus != pytest.ExitCode.OK:
        reporter.write_line("not written to files: not every test has passed")
        return
    folder = results_folder(config)
    written = [path for report in measured for path in report.write(folder)]
    for path in written if len(measured) == 1 else [folder]:
        reporter.write_line(f"{'picture' if path.suffix == '.png' else 'table'}: {shown(path)}")
