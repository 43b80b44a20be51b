"""A slot that is 3 times slower: the split that the library chooses, beside equal chunks and the best fixed split.

The slow slot sleeps longer in its layers, as a slower device would compute longer. The library chooses in 20 calls
before the timing. The best split is searched by timing each candidate in turns. The tests assert that no split changes
the result. The bar of the report fails no test.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from balanced_report import BAR, CAPTION, summarise
from dataparallel import DataParallel, peers
from dataparallel.composable import replicate
from pairs import load, pairs_for, take_turns
from places import Places, device_name
from reporting import Report
from simulator import simulator_notes
from stages import mean_square

SLOTS, SLOW, RATIO = 4, 1, 3
SAMPLES, WIDTH = 32, 24
SLEEP = 4e-4  # seconds for each sample in each of 4 layers
SETTLE = 20  # calls in which the library chooses
ROUNDS = 7  # of the search
MOST_SLOW = 14  # samples of the slow slot, in the search


class Sleeps(nn.Module):
    """4 layers. In each of them the host sleeps for each sample, and 3 times as long on the slow slot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        samples[peers.index()] = len(x)
        for layer in self.layers:
            x = layer(x)
            time.sleep(SLEEP * len(x) * (RATIO if peers.index() == SLOW else 1))
        return x


samples: dict[int, int] = {}
"""The samples of each replica in the last call."""


def split_with(slow: int) -> list[int]:
    """The split in which the slow slot has so many samples and the others share the rest."""
    others, rest = divmod(SAMPLES - slow, SLOTS - 1)
    sizes = [others + (k < rest) for k in range(SLOTS - 1)]
    return [*sizes[:SLOW], slow, *sizes[SLOW:]]


@pytest.fixture(scope="module")
def report(reports: list[Report], places: Places) -> Report:
    reports.append(Report("balanced", CAPTION, notes=simulator_notes(places)))
    return reports[-1]


def slots_of(kind: str, places: Places, report: Report) -> list[torch.device]:
    return [torch.device("cpu")] * SLOTS if kind == "cpu" else places.apart_or_skip(SLOTS, report)[:SLOTS]


@pytest.mark.parametrize(
    ("form", "kind", "work", "workers"),
    [
        ("DataParallel", "cpu", "inference", None),
        ("DataParallel", "cpu", "training, 4 workers", 4),
        ("DataParallel", "cpu", "training, in turn", None),
        ("DataParallel", "apart", "inference", None),
        ("DataParallel", "apart", "training", None),
        ("replicate", "apart", "training", None),
    ],
)
def test_chosen_split(
    form: str,
    kind: str,
    work: str,
    workers: int | None,
    benchmark: BenchmarkFixture,
    report: Report,
    places: Places,
    short: bool,
) -> None:
    """After 20 calls in which the split is chosen."""
    slots = slots_of(kind, places, report)
    source = Sleeps().to(slots[0]).train(work != "inference")
    x = torch.randn(SAMPLES, WIDTH, device=slots[0])

    def model(chunk_sizes: Any) -> nn.Module:
        module = Sleeps().to(slots[0]).train(source.training)
        module.load_state_dict(source.state_dict())
        if form == "replicate":
            return replicate(module, devices=slots, chunk_sizes=chunk_sizes)
        return DataParallel(module, slots, chunk_sizes=chunk_sizes, workers=workers)

    def call(model: nn.Module) -> Tensor:
        output = model(x)
        if source.training:
            mean_square(output).backward()
        return output

    def timed(models: Sequence[nn.Module], rounds: int, warmup: int) -> list[list[float]]:
        calls: list[Callable[[], Any]] = [lambda each=each: call(each) for each in models]
        return take_turns(calls, rounds, warmup, short=short)

    def measure() -> tuple[list[list[float]], list[int]]:
        splits = [split_with(slow) for slow in ((2, 8) if short else range(1, MOST_SLOW + 1))]
        tried = timed([model(split) for split in splits], ROUNDS, 2)
        best = splits[min(range(len(splits)), key=lambda k: statistics.median(tried[k]))]
        for _ in range(2 if short else SETTLE):
            call(chosen)
        return timed([chosen, equal, model(best)], pairs_for(BAR), 0), best

    chosen, equal = model("balanced"), model(None)
    with torch.set_grad_enabled(source.training), nullcontext() if kind == "cpu" else places.clocks_off():
        before = load()
        times, best = benchmark.pedantic(measure, rounds=1)
        loads = (before, load())
        torch.testing.assert_close(call(chosen), call(equal))
        call(chosen)
    found = [samples[slot] for slot in range(SLOTS)]
    if benchmark.enabled:
        report.rows.append(summarise(form, device_name(slots[0]), work, times, best, found, loads))
