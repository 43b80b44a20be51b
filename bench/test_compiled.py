"""Compiled replicas beside eager replicas, and beside the same chunks in a row: a training step, and inference.

The GPT and the BERT of width 24 on four CPU slots, two samples of 32 tokens for each, with Inductor. All ways are in
one process and take turns. Outputs and gradients have to be the same, and after the first calls nothing may be compiled
again. The bars of the report say what its ratios should be; they fail no test.

A second table has predictions for 8 x A100 (`compiled_timelines.py`): what fewer launches would save there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from child_processes import environment
from compiled import WAYS, CompiledBesideEager, compilations, eager_launches, given_up
from compiled_report import CAPTION, PREDICTED_CAPTION, PredictedRow, summarise
from pairs import PAIRS, load, take_turns
from places import Places, first_lines
from reporting import Report
from shapes import NARROW_BERT, NARROW_GPT, Shape

SLOTS = 4
SCRIPT = Path(__file__).with_name("compiled_timelines.py")


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("compiled", CAPTION))
    return reports[-1]


@pytest.fixture(scope="module")
def predicted(reports: list[Report]) -> Report:
    reports.append(Report("compiled_predicted", PREDICTED_CAPTION))
    return reports[-1]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", [NARROW_GPT, NARROW_BERT], ids=lambda shape: shape.name)
def test_on_cpu_slots(
    shape: Shape, training: bool, benchmark: BenchmarkFixture, places: Places, report: Report, short: bool
) -> None:
    if short and (shape is not NARROW_GPT or training):
        pytest.skip("short")
    beside = CompiledBesideEager(shape, SLOTS, training)
    launches = {True: beside.launches_after_fusion(), False: None}
    if places.simulated:
        launches[False] = eager_launches(shape, training, places.simulated[0])
    beside.settle(short)
    beside.check()
    compiled = compilations()

    def compare() -> tuple[list[list[float]], tuple[float, float]]:
        before = load()
        return take_turns([*beside.calls().values()], PAIRS, short=short), (before, load())

    seconds, loads = benchmark.pedantic(compare, rounds=1)
    assert compilations() == compiled
    assert given_up() == {}
    beside.check()
    if benchmark.enabled:
        by_way = dict(zip(WAYS, seconds, strict=True))
        report.rows += summarise(shape.name, training, SLOTS, by_way, launches, loads)


def test_predictions(predicted: Report, short: bool) -> None:
    if short:
        pytest.skip("short")
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    if "why_not" in printed:
        pytest.skip(first_lines(printed["why_not"]))
    predicted.rows += [PredictedRow(**found) for found in printed["predictions"]]
