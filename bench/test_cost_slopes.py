"""What one more tensor, module and slot costs the host, by each form and by ``torch.nn.DataParallel``: slopes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from child_processes import environment
from cost_slopes import GROWTHS, IN_A_ROW, INFERENCE, STEP, TORCH, WAYS, WRAPPER, Size, Timed
from cost_slopes_report import CAPTION, plot, summarise
from places import first_lines
from reporting import Report, table

SCRIPT = Path(__file__).with_name("cost_slopes.py")
ROUNDS, SHORT_ROUNDS = 12, 1
MOST, SHORT_MOST = 1000, 10


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("cost_slopes", CAPTION, plot))
    return reports[-1]


def measured(rounds: int, most: int) -> dict[str, Any]:
    """What the script finds, in a process of its own: CPU time is that of a whole process."""
    command = [sys.executable, str(SCRIPT), str(rounds), str(most)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tensors_modules_and_slots(benchmark: BenchmarkFixture, report: Report, short: bool) -> None:
    """All ways take turns. The script checks outputs and gradients before and after."""
    arguments = (SHORT_ROUNDS, SHORT_MOST) if short else (ROUNDS, MOST)
    found = benchmark.pedantic(measured, arguments, rounds=1)
    if "why_not" in found:
        why_not = first_lines(found["why_not"])
        report.notes.append(f"Slopes were not measured: {why_not}.")
        pytest.skip(why_not)
    timed = [Timed(**each) for each in found["timed"]]
    assert {each.grows for each in timed} == {growth.what for growth in GROWTHS}
    for work, ways in WAYS.items():
        assert {each.way for each in timed if each.work == work} == {*ways}
    if benchmark.enabled:
        report.rows += summarise(timed)
        report.notes.append(f"{len(timed[0].seconds[0])} turns for each size.")


def line(way: str, work: str, begin: float, slope: float, grows: str = "tensors") -> Timed:
    """Times that grow by ``slope`` seconds; the second turn of each is disturbed."""
    numbers = [0, 1, 10, 100]
    return Timed(grows, work, way, numbers, [[begin + slope * n, 5.0] for n in numbers])


class TestRows:
    def test_slopes_are_of_the_fastest_turns_and_beside_torch_and_the_row(self) -> None:
        found = [line(IN_A_ROW, STEP, 1e-3, 2e-6), line(TORCH, STEP, 2e-3, 32e-6), line(WRAPPER, STEP, 3e-3, 8e-6)]
        row = summarise(found)[-1]
        assert (row.slope_microseconds, row.beyond_row_microseconds) == pytest.approx((8, 6), rel=1e-3)
        assert row.torch_over_this == pytest.approx(4, rel=1e-3)
        assert row.intercept_milliseconds == pytest.approx(3, rel=1e-3)
        assert (row.turns, row.numbers) == (2, "0 1 10 100")

    def test_kinds_of_work_are_not_mixed(self) -> None:
        found = [
            line(way, work, 1e-3, slope) for work, slope in ((INFERENCE, 1e-6), (STEP, 5e-6)) for way in WAYS[STEP]
        ]
        for row in summarise(found):
            assert row.torch_over_this == pytest.approx(1)
            assert row.beyond_row_microseconds == pytest.approx(0, abs=1e-6)

    def test_a_table_and_a_picture_can_be_made(self, tmp_path: Path) -> None:
        found = [
            line(way, work, 1e-3, 3e-6, growth.what)
            for growth in GROWTHS
            for work, ways in WAYS.items()
            for way in ways
        ]
        rows = summarise(found)
        assert "one more" in table([row.cells() for row in rows])
        plot(rows, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 0


def test_only_one_thing_grows() -> None:
    tensors, modules, slots = (growth.sizes(10) for growth in GROWTHS)
    assert tensors == [Size(tensors=number) for number in (0, 1, 10)]
    assert modules == [Size(modules=number) for number in (1, 10)]
    assert slots == [Size(slots=number) for number in (2, 4, 8)]
