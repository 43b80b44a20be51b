"""What a training step of models of real size would take on published machines: predictions, by timelines.

Each model has a process of its own, in which kernels are skipped (`timelines`). The predictions are not judged.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from child_processes import environment
from places import first_lines
from published import PUBLISHED, PUBLISHED_SHAPES
from real_shapes import GPT_768, REAL_SHAPES, RealShape
from reporting import Report
from timelines import REPLICATE
from timelines_report import CAPTION, PUBLISHED_CAPTION, Row, beside_published

SCRIPT = Path(__file__).with_name("timelines.py")
COUNTS, SHORT_COUNTS = (2, 4, 8), (8,)
SHORT_WAYS = (REPLICATE,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes leave pictures."""
    return tmp_path_factory.mktemp("timelines")


@pytest.fixture(scope="module")
def report(reports: list[Report], folder: Path, short: bool) -> Report:
    """Its picture is that of one step, which a short run does not draw."""

    def copy_picture(rows: Sequence[Row], path: Path) -> None:
        shutil.copyfile(folder / "step.png", path)

    reports.append(Report("timelines", CAPTION, None if short else copy_picture))
    return reports[-1]


@pytest.fixture(scope="module")
def published(reports: list[Report]) -> Report:
    reports.append(Report("timelines_published", PUBLISHED_CAPTION))
    return reports[-1]


@cache
def predicted(shape: RealShape, counts: tuple[int, ...], folder: Path, *ways: str) -> list[Row]:
    """What the script predicts, in a process of its own. Skips the test where devices cannot be simulated."""
    command = [sys.executable, str(SCRIPT), shape.name, ",".join(map(str, counts)), str(folder), *ways]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if "why_not" in found:
        pytest.skip(first_lines(found["why_not"]))
    return [Row(**prediction) for prediction in found["predictions"]]


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape.name)
def test_predictions(shape: RealShape, benchmark: BenchmarkFixture, report: Report, folder: Path, short: bool) -> None:
    if short and shape is not GPT_768:
        pytest.skip("short")
    asked = (shape, SHORT_COUNTS, folder, *SHORT_WAYS) if short else (shape, COUNTS, folder)
    report.rows += benchmark.pedantic(predicted, asked, rounds=1)


@pytest.mark.parametrize("shape", PUBLISHED_SHAPES, ids=lambda shape: shape.name)
def test_beside_published_figures(
    shape: RealShape, benchmark: BenchmarkFixture, published: Report, folder: Path, short: bool
) -> None:
    if short:
        pytest.skip("short")
    own = [figure for figure in PUBLISHED if figure.shape == shape]
    rows = benchmark.pedantic(predicted, (shape, COUNTS, folder), rounds=1)
    published.rows += beside_published(own, rows)
