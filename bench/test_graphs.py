"""What captured graphs bring, on CUDA devices: ``python -m nogpu.cuda -m pytest bench/test_graphs.py``.

On a stand-in for CUDA the CPU computes the kernels, with graphs and without. So only the work of the host is compared.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from captured_graphs import DEVICES, REPLICATE, SAMPLES, SHARDED, TRAINING, WRAPPER, Row, measure
from nogpu import cuda
from places import Places
from reporting import Report
from shapes import NARROW_BERT, NARROW_GPT, RESNET, WIDE_GPT, Shape
from simulator import simulator_notes

MOST_CALLS = 60

CAPTION = f"""\
The same model with ``graphs=True`` and without, {SAMPLES} samples on each of {DEVICES} devices. training step is
forward, loss and backward. On a stand-in for CUDA its clocks were off, and the CPU computes the kernels, with graphs
and without.

ms
    The median over the pairs, from idle devices to idle devices.
as it is/graphs
    The median over the pairs: above 1, graphs are faster.
MiB
    At most in a training step, on the device that has most, with the model and its replicas.
calls
    How often the host launches a kernel, a copy or a graph on a device, in one call. "of graphs" is how many of these
    launch a graph. With graphs at most {MOST_CALLS} are wanted in a training step."""

MODELS = [RESNET, NARROW_GPT, NARROW_BERT, WIDE_GPT]


@pytest.fixture(scope="module")
def report(reports: list[Report]) -> Report:
    reports.append(Report("graphs", CAPTION))
    return reports[-1]


@pytest.mark.parametrize("form", [WRAPPER, REPLICATE, SHARDED])
@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_with_and_without_graphs(shape: Shape, form: str, report: Report, places: Places, short: bool) -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < DEVICES:
        pytest.skip(f"needs {DEVICES} CUDA devices")
    if short and shape is not RESNET:
        pytest.skip("short")
    devices = [torch.device("cuda", index) for index in range(DEVICES)]
    with cuda.clocks(False) if cuda.is_stand_in() else nullcontext():
        rows = measure(shape, form, devices, short)
    assert all(row.launches != 0 for row in rows)
    report.rows += rows
    if not report.notes:
        report.notes += simulator_notes(places)


def test_a_row_says_how_many_times_as_fast() -> None:
    row = Row("net", WRAPPER, TRAINING, 3.0, 2.0, 1.5, 1.4, 1.6, 15, 10.0, 12.5, 300.0, 40.0, 24.0)
    cells = row.cells()
    assert math.isclose(float(cells["as it is/\ngraphs"]), 1.5)
    assert cells["graphs,\nMiB"] == "12.5"
