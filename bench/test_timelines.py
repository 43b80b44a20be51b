"""What a training step of models of real size would take on published machines: predictions, by timelines.

Each model has a process of its own, in which kernels are skipped (`timelines`). The predictions are not judged.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from child_processes import environment
from places import first_lines
from published import PUBLISHED, PUBLISHED_SHAPES
from real_shapes import GPT_768, REAL_SHAPES, RealShape
from reporting import Report
from timelines import REPLICATE, SHARDED
from timelines_report import CAPTION, PUBLISHED_CAPTION, Row, beside_published, judged

SCRIPT = Path(__file__).with_name("timelines.py")
COUNTS, SHORT_COUNTS = (2, 4, 8), (2,)
SHORT_WAYS = (REPLICATE, SHARDED)


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


def predictions(shape: RealShape, counts: Sequence[int], folder: Path, ways: Sequence[str]) -> dict[str, Any]:
    """What the script prints, in a process of its own."""
    command = [sys.executable, str(SCRIPT), shape.name, ",".join(map(str, counts)), str(folder), *ways]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def predicted(folder: Path, short: bool) -> Iterator[Callable[[RealShape], list[Row]]]:
    """The predictions of a model. Skips the test where devices cannot be simulated.

    Two processes run at a time, which disturb nothing: Python between launches is measured in CPU time.
    """
    asked = ([GPT_768], SHORT_COUNTS, SHORT_WAYS) if short else ([*REAL_SHAPES, *PUBLISHED_SHAPES], COUNTS, ())
    shapes, counts, ways = asked
    with ThreadPoolExecutor(2) as pool:
        found = {shape: pool.submit(predictions, shape, counts, folder, ways) for shape in dict.fromkeys(shapes)}

        def of(shape: RealShape) -> list[Row]:
            printed = found[shape].result()
            if "why_not" in printed:
                pytest.skip(first_lines(printed["why_not"]))
            return [Row(**prediction) for prediction in printed["predictions"]]

        yield of
        for future in found.values():
            future.cancel()


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=lambda shape: shape.name)
def test_predictions(
    shape: RealShape, report: Report, predicted: Callable[[RealShape], list[Row]], short: bool
) -> None:
    if short and shape is not GPT_768:
        pytest.skip("short")
    rows = predicted(shape)
    report.rows += rows
    report.notes += judged(rows)


@pytest.mark.parametrize("shape", PUBLISHED_SHAPES, ids=lambda shape: shape.name)
def test_beside_published_figures(
    shape: RealShape, published: Report, predicted: Callable[[RealShape], list[Row]], short: bool
) -> None:
    if short:
        pytest.skip("short")
    own = [figure for figure in PUBLISHED if figure.shape == shape]
    published.rows += beside_published(own, predicted(shape))
