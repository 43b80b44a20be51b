"""The number of replicas that run at a time: the library's choice beside every fixed number.

Three models, and one that sleeps 1 ms in each of 12 layers, as if it waited for a device. The library chooses in 40
calls before the timing. The tests assert that the number changes no result, bit for bit. The bar of the report fails no
test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from dataparallel import DataParallel
from pairs import SHORT_PAIRS, load, pairs_for, take_turns
from permits_report import BAR, CAPTION, FIXED, plot, summarise
from places import Places
from reporting import Report
from shapes import NARROW_GPT, RESNET, WIDE_GPT, Shape
from simulator import simulator_notes
from stages import mean_square

DEVICES = 8
SAMPLES_PER_DEVICE = 2
SETTLE = 40  # calls in which the library chooses
SHORT_SETTLE = 2

PHASE = 50  # calls until the batch changes
SMALL, LARGE = 1, 64  # samples for each device


class Sleeps(nn.Module):
    """12 layers. In each of them the host sleeps 1 ms, as if it waited for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            time.sleep(1e-3)
        return x


def linears() -> nn.Module:
    """A model that is launch-bound with few samples and compute-bound with many."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.ReLU())))


SLEEPS = Shape("1 ms of sleep in each layer", Sleeps, lambda n: torch.randn(n, 24), 14, 24, 0)
LINEARS = Shape("8 linears of width 128", linears, lambda n: torch.randn(n, 128), 17, 16, 0)


class Wrapped:
    """One module in a wrapper that chooses the number, and in one wrapper for each fixed number."""

    def __init__(self, shape: Shape, devices: Sequence[torch.device]) -> None:
        self.module = shape.model().to(devices[0])
        self.batch = shape.batch(SAMPLES_PER_DEVICE * len(devices)).to(devices[0])
        self.chosen = DataParallel(self.module, device_ids=devices)
        self.fixed = {number: DataParallel(self.module, device_ids=devices, workers=number) for number in FIXED}
        self.all = [self.chosen, *self.fixed.values()]

    def infer(self, model: nn.Module) -> Tensor:
        return model(self.batch)

    def train(self, model: nn.Module) -> list[Tensor]:
        mean_square(model(self.batch)).backward()
        gradients = [parameter.grad for parameter in self.module.parameters()]
        self.module.zero_grad()
        return gradients

    def check(self, work: Callable[[nn.Module], Any]) -> None:
        """Raises `AssertionError` if the number changes the result."""
        expected, *others = map(work, self.all)
        for other in others:
            torch.testing.assert_close(other, expected, rtol=0, atol=0)

    def most_at_once(self, work: Callable[[nn.Module], Any]) -> int:
        """The most replicas that were in forward at the same time in one call with the chosen number."""
        lock, running, most = threading.Lock(), 0, 0

        def enter(*_: Any) -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)

        def leave(*_: Any) -> None:
            nonlocal running
            with lock:
                running -= 1

        hooks = [self.module.register_forward_pre_hook(enter), self.module.register_forward_hook(leave)]
        work(self.chosen)
        for hook in hooks:
            hook.remove()
        return most


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("permits", CAPTION, plot, notes=simulator_notes(places)))
    return reports[-1]


@pytest.fixture
def devices(places: Places, report: Report) -> list[torch.device]:
    return places.apart_or_skip(DEVICES, report)[:DEVICES]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("shape", [RESNET, NARROW_GPT, WIDE_GPT, SLEEPS], ids=lambda shape: shape.name)
def test_chosen_number(
    shape: Shape,
    training: bool,
    devices: list[torch.device],
    benchmark: BenchmarkFixture,
    report: Report,
    places: Places,
    short: bool,
) -> None:
    """After calls in which the number is chosen."""
    if short and shape not in (NARROW_GPT, SLEEPS):
        pytest.skip("short")
    wrapped = Wrapped(shape, devices)
    work = wrapped.train if training else wrapped.infer

    def measure() -> list[list[float]]:
        for _ in range(SHORT_SETTLE if short else SETTLE):
            work(wrapped.chosen)
        calls = [lambda model=model: work(model) for model in wrapped.all]
        return take_turns(calls, pairs_for(BAR), short=short)

    wrapped.module.train(training)
    with torch.set_grad_enabled(training):
        with places.clocks_off():
            before = load()
            chosen, *fixed = benchmark.pedantic(measure, rounds=1)
            loads = (before, load())
            at_once = str(wrapped.most_at_once(work))
        wrapped.check(work)
    if benchmark.enabled:
        name = "training step" if training else "inference"
        seconds = dict(zip(FIXED, fixed, strict=True))
        report.rows.append(summarise(shape.name, name, chosen, seconds, at_once, loads))


@torch.no_grad()
def test_changing_batch(
    devices: list[torch.device], benchmark: BenchmarkFixture, report: Report, places: Places, short: bool
) -> None:
    """Every 50 calls the batch changes between 1 and 64 samples for each device. Choosing is part of the time.

    A pair is 100 calls with each number, so that slow calls, in which the library chooses, count for what they take.
    """
    wrapped = Wrapped(LINEARS, devices)
    wrapped.module.eval()
    phase = 2 if short else PHASE
    pairs = SHORT_PAIRS if short else pairs_for(BAR)
    batches = [LINEARS.batch(samples * len(devices)).to(devices[0]) for samples in (SMALL, LARGE)]

    def stepper(model: nn.Module) -> Callable[[], Any]:
        count = 0

        def step() -> None:
            nonlocal count
            model(batches[count // phase % 2])
            count += 1

        return step

    def measure() -> list[list[float]]:
        return take_turns([stepper(model) for model in wrapped.all], 2 * phase * pairs, warmup=0)

    with places.clocks_off():
        before = load()
        steps = benchmark.pedantic(measure, rounds=1)
        loads = (before, load())
    for batch in batches:
        wrapped.batch = batch
        wrapped.check(wrapped.infer)
    if benchmark.enabled:
        size = 2 * phase
        chosen, *fixed = [[sum(own[k : k + size]) / size for k in range(0, len(own), size)] for own in steps]
        work = f"batch changes every {phase} calls"
        report.rows.append(summarise(LINEARS.name, work, chosen, dict(zip(FIXED, fixed, strict=True)), "", loads))
