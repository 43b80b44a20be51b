"""Whether the cost on the host grows linearly: with 1 to 32 slots, and with 10 to 10,000 parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from child_processes import environment
from linear_cost import PARAMETERS, SLOTS, Size
from linear_cost_report import CAPTION, fitted, plot, summarise
from places import first_lines
from reporting import Report

SCRIPT = Path(__file__).with_name("linear_cost.py")
SLOT_ROUNDS = 8
PARAMETER_ROUNDS = 3
SHORT_ROUNDS = 2
SHORT_MOST_SLOTS = 8
SHORT_MOST_PARAMETERS = 300


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("linear_cost", CAPTION, plot))
    return reports[-1]


def measured(slot_rounds: int, most_slots: int, parameter_rounds: int, most_parameters: int) -> dict[str, Any]:
    """What the script finds. It needs a process of its own because it simulates more devices than this one."""
    arguments = map(str, (slot_rounds, most_slots, parameter_rounds, most_parameters))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_slots_and_parameters(benchmark: BenchmarkFixture, report: Report, short: bool) -> None:
    """All sizes take turns. The script checks replicas, outputs and gradients before and after."""
    if short:
        arguments = (SHORT_ROUNDS, SHORT_MOST_SLOTS, SHORT_ROUNDS, SHORT_MOST_PARAMETERS)
    else:
        arguments = (SLOT_ROUNDS, SLOTS[-1], PARAMETER_ROUNDS, PARAMETERS[-1])
    found = benchmark.pedantic(measured, arguments, rounds=1)
    if "why_not" in found:
        why_not = first_lines(found["why_not"])
        report.notes.append(f"Growth was not measured: {why_not}.")
        pytest.skip(why_not)
    if benchmark.enabled:
        for grows in ("slots", "parameters"):
            sizes = [Size(**size) for size in found[grows]]
            rows = summarise(grows, sizes, decided=not short)
            report.rows.extend(rows)
            report.notes.append(f"{', '.join(rows[0].sizes.split())} {grows}, {rows[0].turns} turns each.")


def test_line_through_points_of_a_line() -> None:
    x = [1, 2, 4, 8]
    line = fitted(x, [3 * k + 2 for k in x])
    assert line == pytest.approx((3, 2, 1))


def test_r_squared_is_the_squared_correlation() -> None:
    x, y = [1.0, 2.0, 3.0, 5.0], [1.0, 3.0, 2.0, 6.0]
    assert fitted(x, y).r_squared == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
