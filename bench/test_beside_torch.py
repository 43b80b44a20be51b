"""Replicating, inference and training steps beside ``torch.nn.parallel``, on the same module, batch and devices.

2, 4 and 8 devices, 2 samples for each. The ResNet-50 of width 4, and the GPT and the BERT of width 24, spend their time
in launches. The GPT of width 128 with 64 tokens spends it in its operators. The tests assert that both libraries do the
same work. The bars of the report say what its ratios should be; they fail no test.

Outputs and gradients have to be those of the chunks on one device, in float64, and in float32 after the timing. Each
tensor of each replica is looked up in the dictionaries of its module and compared with the source. Except inside
``frozen()`` that is repeated after values have been changed through ``.data``, which moves no version counter: old
replicas would be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from beside_torch import SETTLE, SHORT_SETTLE, BesideTorch
from beside_torch_report import (
    BAR_DEVICES,
    CAPTION,
    INFERENCE,
    INFERENCE_FROZEN,
    REPLICATE,
    REPLICATE_AND_END,
    REPLICATE_FROZEN,
    REPLICATE_NO_GRAD,
    TRAINING,
    plot,
    summarise,
)
from pairs import PAIRS, Call
from places import Places
from ready_replicas import ReadyReplicas
from reporting import Report
from shapes import NARROW_BERT, NARROW_GPT, RESNET, WIDE_GPT, Shape
from simulator import simulator_notes

Measure = Callable[..., None]

pytestmark = [
    pytest.mark.filterwarnings("ignore:PyTorch is not compiled with NCCL support"),
    pytest.mark.parametrize("count", [2, 4, 8]),
    pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, NARROW_BERT, WIDE_GPT], ids=lambda shape: shape.name),
]


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("beside_torch", CAPTION, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture
def devices(shape: Shape, count: int, places: Places, short: bool, report: Report) -> list[torch.device]:
    if short and (shape, count) not in ((NARROW_GPT, 8), (RESNET, 2)):
        pytest.skip("short")
    return places.apart_or_skip(count, report)[:count]


@pytest.fixture
def beside(shape: Shape, devices: list[torch.device]) -> BesideTorch:
    return BesideTorch(shape, devices)


@pytest.fixture
def measure(
    shape: Shape, beside: BesideTorch, benchmark: BenchmarkFixture, places: Places, report: Report, short: bool
) -> Measure:
    """A function that times calls in turn and reports them. To pytest-benchmark all of them are one round."""

    def run(
        work: str,
        ours: Call,
        theirs: Call,
        in_a_row: Call | None = None,
        between: Call | None = None,
        ready: Mapping[int, Call] = MappingProxyType({}),
    ) -> None:
        settle = SHORT_SETTLE if short else SETTLE
        pairs = 2 * PAIRS if len(beside.devices) == BAR_DEVICES else PAIRS
        with places.clocks_off():
            arguments = (ours, theirs, pairs, settle, short, in_a_row, between, ready)
            timed = benchmark.pedantic(beside.time, arguments, rounds=1)
        if benchmark.enabled:
            report.rows += summarise(shape.name, beside.devices, work, timed)

    return run


def test_same_results_in_float64(shape: Shape, devices: list[torch.device]) -> None:
    beside = BesideTorch(shape, devices, torch.float64)
    beside.check_training()
    with torch.no_grad():
        beside.module.eval()
        beside.check_inference()


def test_replicate(beside: BesideTorch, measure: Measure) -> None:
    measure(REPLICATE, beside.replicate, beside.torch_replicate)
    beside.check_replicas()


@torch.no_grad()
def test_replicate_without_gradients(beside: BesideTorch, measure: Measure) -> None:
    """By the wrappers, as in their ``forward``: without a graph."""
    measure(REPLICATE_NO_GRAD, beside.wrapper_replicate, beside.torch_wrapper_replicate, between=beside.end)
    beside.check_replicas()


@torch.no_grad()
def test_replicate_and_end(beside: BesideTorch, measure: Measure) -> None:
    """The same with what the wrappers do to replicas at the end of a call."""
    measure(REPLICATE_AND_END, beside.wrapper_replicate_and_end, beside.torch_wrapper_replicate_and_end)
    beside.check_replicas()


@torch.no_grad()
def test_replicate_frozen(beside: BesideTorch, measure: Measure) -> None:
    """By the wrappers, where the library may rely on unchanged values."""
    with beside.ours.options.frozen():
        measure(REPLICATE_FROZEN, beside.wrapper_replicate, beside.torch_wrapper_replicate, between=beside.end)
        beside.check_replicas(sent=False)


def ready_replicas(beside: BesideTorch) -> dict[int, ReadyReplicas]:
    """By the number of their threads. None where no bar is judged."""
    found = beside.ready_replicas() if len(beside.devices) == BAR_DEVICES else {}
    for replicas in found.values():
        replicas.check(beside.module, beside.batch)
    return found


def test_inference(beside: BesideTorch, measure: Measure) -> None:
    """Also by ready replicas, which is the least time that it can take."""
    beside.module.eval()
    ready = {threads: replicas.infer for threads, replicas in ready_replicas(beside).items()}
    with torch.no_grad():
        measure(INFERENCE, beside.infer, beside.torch_infer, ready=ready)
        beside.check_inference()


def test_inference_frozen(beside: BesideTorch, measure: Measure) -> None:
    beside.module.eval()
    ready = {threads: replicas.infer for threads, replicas in ready_replicas(beside).items()}
    with torch.no_grad(), beside.ours.options.frozen():
        measure(INFERENCE_FROZEN, beside.infer, beside.torch_infer, ready=ready)
        beside.check_inference()


def test_training_step(beside: BesideTorch, measure: Measure) -> None:
    """Without an optimizer, so that all steps are the same. Also beside the chunks in a row on one device."""
    ready = {threads: replicas.train for threads, replicas in ready_replicas(beside).items()}
    measure(TRAINING, beside.train, beside.torch_train, beside.train_in_a_row, ready=ready)
    beside.check_training()
