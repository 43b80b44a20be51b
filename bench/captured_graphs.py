"""Replicas that launch captured graphs beside replicas that run as they are: time, memory and launches on CUDA devices.

The same model is there twice, and calls of both take turns. The memory is that of a training step, more than before
the model was made, on the device that has most of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from nogpu import cuda
from pairs import PAIRS, Comparison, alternate
from shapes import Shape
from sharded_blocks import sharded
from stages import mean_square

DEVICES = 8
SAMPLES = 2
SETTLE = 6
"""Calls of each kind before the first one that counts: two run as they are, and the third one captures."""

WRAPPER, REPLICATE, SHARDED = "DataParallel", "composable.replicate", "composable.fully_shard"
INFERENCE, TRAINING = "inference", "training step"


@dataclass(frozen=True)
class Row:
    """One kind of work by one form."""

    model: str
    form: str
    work: str
    plain_ms: float
    graphs_ms: float
    ratio: float
    low: float
    high: float
    pairs: int
    plain_mib: float
    graphs_mib: float
    plain_calls: float
    graphs_calls: float
    launches: float

    def cells(self) -> dict[str, str]:
        return {
            "model": self.model,
            "form": self.form,
            "work": self.work,
            "as it is,\nms": f"{self.plain_ms:.1f}",
            "graphs,\nms": f"{self.graphs_ms:.1f}",
            "as it is/\ngraphs": f"{self.ratio:.2f}",
            "95 % interval": f"{self.low:.2f} to {self.high:.2f}",
            "pairs": str(self.pairs),
            "as it is,\nMiB": f"{self.plain_mib:.1f}",
            "graphs,\nMiB": f"{self.graphs_mib:.1f}",
            "as it is,\ncalls": f"{self.plain_calls:.0f}",
            "graphs,\ncalls": f"{self.graphs_calls:.0f}",
            "of graphs": f"{self.launches:.0f}",
        }


class Prepared:
    """A model by a form, with or without graphs, that has settled."""

    def __init__(self, shape: Shape, form: str, graphs: bool, devices: Sequence[torch.device]) -> None:
        before = [torch.cuda.memory_allocated(device) for device in devices]
        torch.manual_seed(0)
        self.module: nn.Module = shape.make().to(devices[0])
        self.inputs = shape.make_batch(SAMPLES * len(devices)).to(devices[0])
        if form == WRAPPER:
            self.network: Any = DataParallel(self.module, devices, graphs=graphs)
        elif form == SHARDED:
            self.network = sharded(self.module, devices, graphs=graphs)
        else:
            self.network = replicate(self.module, devices=devices, graphs=graphs)
        for call in (self.train, self.infer):
            for _ in range(SETTLE):
                call()
        self.module.zero_grad()
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        self.train()
        peaks = [torch.cuda.max_memory_allocated(device) for device in devices]
        self.mib = max(peak - own for peak, own in zip(peaks, before, strict=True)) / 2**20
        self.module.zero_grad()

    def infer(self) -> None:
        """A call without gradients."""
        with torch.no_grad():
            self.network(self.inputs)

    def train(self) -> None:
        """Forward, loss and backward. Gradients are dropped before."""
        self.module.zero_grad()
        mean_square(self.network(self.inputs)).backward()


def measure(shape: Shape, form: str, devices: Sequence[torch.device], short: bool) -> list[Row]:
    """Inference and training with a form."""
    plain, graphs = (Prepared(shape, form, each, devices) for each in (False, True))
    rows = []
    for work in (INFERENCE, TRAINING):
        ours, theirs = (_call(prepared, work) for prepared in (graphs, plain))
        (calls, launches), (plain_calls, _) = (_calls_of(call, len(devices)) for call in (ours, theirs))
        compared = alternate(ours, theirs, PAIRS, short=short)
        rows.append(_row(shape, form, work, compared, (plain.mib, graphs.mib), (plain_calls, calls, launches)))
    return rows


def _call(prepared: Prepared, work: str) -> Callable[[], None]:
    return prepared.infer if work == INFERENCE else prepared.train


def _calls_of(call: Callable[[], None], devices: int) -> tuple[float, float]:
    """How often the host launches something on a device, and how often that is a graph. Means over the devices.

    Only a stand-in counts them.
    """
    if not cuda.is_stand_in():
        return math.nan, math.nan
    with cuda.counted() as counts:
        call()
    launches = counts.calls["cudaGraphLaunch"]
    return (sum(counts.launches) - sum(counts.in_graphs) + launches) / devices, launches / devices


def _row(
    shape: Shape,
    form: str,
    work: str,
    compared: Comparison,
    mib: tuple[float, float],
    calls: tuple[float, float, float],
) -> Row:
    plain, graphs = (1e3 * statistics.median(times) for times in (compared.theirs, compared.ours))
    ratio = compared.ratio, compared.low, compared.high, compared.pairs
    return Row(shape.name, form, work, plain, graphs, *ratio, *mib, *calls)
