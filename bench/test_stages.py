"""Where the time of a training step goes: each stage by itself, for two models, on 1, 2, 4 and 8 devices.

Slots on one device have nothing to copy. So without accelerators and simulated devices nothing is measured.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from places import Places
from progress import Progress
from reporting import Report
from shapes import SHAPES, Shape
from stages import staged
from stages_report import CAPTION, plot, summarise

SAMPLES = 16
ROUNDS = 40
SHORT_ROUNDS = 5
CHOOSING = 30
"""Steps in which the library chooses how many replicas run at a time."""

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.split()[0])


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("stages", CAPTION, plot))
    return reports[-1]


@each_shape
def test_stages(
    shape: Shape,
    benchmark: BenchmarkFixture,
    progress: Progress,
    report: Report,
    places: Places,
    short: bool,
) -> None:
    """A round is a step on each number of devices, and the same chunks by hand.

    Before and after, outputs and gradients of a step are those of the chunks by hand on one device.
    """
    devices = places.apart_or_skip(1, report)
    rounds = SHORT_ROUNDS if short else ROUNDS
    counts = [n for n in (1, 2, 4, 8) if n <= len(devices)]
    trainings = [staged(shape.model, shape.batch(SAMPLES), devices[:n]) for n in counts]
    for training in trainings:
        training.check()
        for _ in range(0 if short else CHOOSING):
            training.step()
        training.steps.clear()

    def step_each() -> None:
        for training in trainings:
            training.step()
            training.step_by_hand()
        bar.update()

    with progress(shape.name, rounds) as bar, places.clocks_off():
        benchmark.pedantic(step_each, rounds=rounds)
    if benchmark.enabled:
        report.rows += summarise(shape.name, trainings)
    for training in trainings:
        training.check()
