"""Where the time of a training step goes: each stage by itself, for two shapes of model, on several devices."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tqdm import tqdm

from places import Places
from reporting import Report
from shapes import SHAPES, Shape
from stages import staged
from stages_report import CAPTION, plot, summarise

SAMPLES = 16
ROUNDS = 40
SHORT_ROUNDS = 5
CHOOSING = 30
"""Steps in which the number of replicas that run at a time is chosen."""

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.split()[0])


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("stages", CAPTION, plot))
    return reports[-1]


@pytest.fixture
def devices(places: Places, report: Report) -> list[torch.device]:
    """Accelerators, else simulated ones: slots on one device have nothing to scatter or replicate over."""
    if places.simulated or places.real[0].type != "cpu":
        return places.simulated or places.real
    note = f"Stages were not measured: {places.why_not_simulated}."
    if note not in report.notes:
        report.notes.append(note)
    pytest.skip(note)


@each_shape
def test_shape(shape: Shape) -> None:
    model = shape.model()
    assert len(list(model.modules())) == shape.modules
    assert len(list(model.parameters())) == shape.parameters
    assert len(list(model.buffers())) == shape.buffers


@each_shape
def test_stages(
    shape: Shape,
    devices: list[torch.device],
    benchmark: BenchmarkFixture,
    capsys: pytest.CaptureFixture[str],
    report: Report,
    places: Places,
    short: bool,
) -> None:
    """One round is a step on every number of devices, each beside the same chunks by hand.

    Before and after, a step's outputs and gradients are those of the chunks by hand on one device.
    """
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

    with (
        capsys.disabled(),
        tqdm(total=rounds, desc=shape.name, unit="round", disable=None) as bar,
        places.clocks_off(),
    ):
        benchmark.pedantic(step_each, rounds=rounds)
    if benchmark.enabled:
        report.rows += summarise(shape.name, trainings)
    for training in trainings:
        training.check()
