"""Two CPU slots in Pythons with and without a lock, beside one thread alone, two plain threads, and two processes.

``--python=PATH``, which may come several times, names the interpreters. All of them need torch, and take turns. Without
it only the Python that runs this is measured. Outputs and gradients of each way are checked before it is timed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from child_processes import BENCH, environment, environment_of
from free_slots import Timed, interpreters, measure
from free_threads import ALONE, DDP, INFERENCE, THREADS, TRAINING, WITH_WORKERS, WRAPPER, Task, ways
from free_threads_report import CAPTION, Row, plot, pythons_of, rows_of, summarise
from launch_bound import LAYERS
from options import pythons
from pairs import PAIRS
from progress import Progress
from reporting import Report, table

ROUNDS = 20
SHORT_ROUNDS = 2
SHORT_LAYERS = (10,)


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("free_threads", CAPTION, plot))
    return reports[-1]


def test_two_slots_with_and_without_a_lock(
    benchmark: BenchmarkFixture,
    report: Report,
    progress: Progress,
    tmp_path: Path,
    short: bool,
    request: pytest.FixtureRequest,
) -> None:
    """What the processes are when they end is what they were: no import has brought a lock back."""
    with_ddp = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    layers = SHORT_LAYERS if short else LAYERS
    with interpreters(pythons(request.config), tmp_path, with_ddp) as started:
        with progress("two slots", 2 * len(layers)) as bar:
            arguments = (started, layers, SHORT_ROUNDS if short else ROUNDS, bar.update)
            found = benchmark.pedantic(measure, arguments, rounds=1)
        for python in started:
            assert python.has_lock() == python.lock
    for timed in found:
        assert set(timed.seconds) == {*ways(timed.work), *([DDP] if with_ddp else [])}
    if benchmark.enabled:
        report.rows += summarise(found, decided=not short)
        rounds, (start, _), (_, end) = len(found[0].seconds[ALONE]), found[0].loads, found[-1].loads
        report.notes.append(
            f"{'; '.join(pythons_of(report.rows))}. {rounds} rounds. Load of the machine (average of a minute, in "
            f"processes): {start:.1f} at the start, {end:.1f} at the end."
        )


def timed(lock: bool, work: str = INFERENCE) -> Timed:
    """One slot alone takes 1 ms, two plain threads 1.1, two slots 1.2, and two processes 2."""
    seconds = {ALONE: 1e-3, THREADS: 1.1e-3, WRAPPER: 1.2e-3, DDP: 2e-3}
    return Timed("3.13.0", lock, "2.12", work, 30, {way: [value] * PAIRS for way, value in seconds.items()}, [1.0, 2.0])


def row_of(way: str, found: Timed, decided: bool = True) -> Row:
    return next(row for row in rows_of(found, decided) if row.way == way)


class TestRows:
    def test_ratios_are_to_one_thread_two_threads_and_two_processes(self) -> None:
        row = row_of(WRAPPER, timed(lock=False))
        assert (row.over_alone, row.over_threads) == pytest.approx((1.2, 1.2 / 1.1))
        assert row.over_processes == pytest.approx(0.6)
        assert (row.operators, row.name) == (60, "3.13.0, free")

    @pytest.mark.parametrize(("work", "slots", "verdict"), [
        (INFERENCE, 1.2e-3, "yes"), (INFERENCE, 1.3e-3, "no"), (TRAINING, 1.3e-3, "yes"), (TRAINING, 1.4e-3, "no"),
    ])  # fmt: skip
    def test_the_bar_is_that_of_the_work(self, work: str, slots: float, verdict: str) -> None:
        found = timed(lock=False, work=work)
        found.seconds[WRAPPER] = [slots] * PAIRS
        assert row_of(WRAPPER, found).within_bar == verdict
        assert row_of(WRAPPER, found, decided=False).within_bar == "not decided"

    def test_there_is_no_bar_where_python_has_a_lock_and_for_what_is_not_ours(self) -> None:
        assert all(row.bar is None for row in rows_of(timed(lock=True), decided=True))
        barred = [row.way for row in rows_of(timed(lock=False), decided=True) if row.bar is not None]
        assert barred == [WRAPPER]

    def test_a_table_and_a_picture_can_be_made_of_two_pythons(self, tmp_path: Path) -> None:
        found = [timed(lock, work) for work in (INFERENCE, TRAINING) for lock in (True, False)]
        rows = summarise(found, decided=True)
        assert "3.13.0, lock" in table([row.cells() for row in rows])
        assert pythons_of(rows) == ["Python 3.13.0, lock, torch 2.12", "Python 3.13.0, free, torch 2.12"]
        plot(rows, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 0

    def test_without_ddp_its_cell_is_empty(self) -> None:
        found = timed(lock=True)
        del found.seconds[DDP]
        assert row_of(WRAPPER, found).cells()["/DDP"] == ""


def test_a_task_is_told_in_a_line() -> None:
    task = Task(WRAPPER + WITH_WORKERS, TRAINING, 120)
    assert Task.of(str(task)) == task


def test_this_python_is_measured_where_none_is_named(pytestconfig: pytest.Config) -> None:
    assert pythons(pytestconfig) == (pytestconfig.getoption("pythons") or [sys.executable])


def test_another_python_gets_no_packages_of_this_one() -> None:
    paths = environment_of("/usr/bin/another", SOME="value")["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(BENCH.parent), str(BENCH)]
    assert environment_of(sys.executable) == environment()
