"""What a Python without a lock would save on 8 devices: predictions, by timelines. They are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from child_processes import environment
from free_timelines_report import CAPTION, INFERENCE, PredictedRow
from launch_bound import LAYERS
from places import first_lines
from real_shapes import GPT_768, RESNET50
from reporting import Report, table
from timelines import ALONE, REPLICATE

SCRIPT = Path(__file__).with_name("free_timelines.py")
SHORT_LAYERS = (5,)
MODELS = (GPT_768.name, RESNET50.name)


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("free_timelines", CAPTION))
    return reports[-1]


def test_eight_devices_with_and_without_a_lock(report: Report, short: bool) -> None:
    """The devices have a process of their own, in which kernels are skipped."""
    layers, models = (SHORT_LAYERS, ()) if short else (LAYERS, MODELS)
    command = [sys.executable, str(SCRIPT), ",".join(map(str, layers)), ";".join(models)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    if "why_not" in printed:
        pytest.skip(first_lines(printed["why_not"]))
    rows = [PredictedRow(**prediction) for prediction in printed["predictions"]]
    for row in rows:
        assert row.no_lock <= row.lock * (1 + 1e-9)
        if row.way == ALONE:
            assert row.gain == pytest.approx(1), "one thread waits for no lock"
    report.rows += rows


def test_a_table_and_a_csv_file_can_be_made() -> None:
    row = PredictedRow("60 operators", INFERENCE, REPLICATE, 8, "8 x A100", 500, 480, 6.0, 2.0, 9.0, 3.0, 0.5, 1.5)
    assert (row.gain, row.measured_gain) == (3, 3)
    assert "3.00" in table([row.cells(), replace(row, lock=4.0).cells()])
    assert all(getattr(row, column.name) is not None for column in fields(row))
