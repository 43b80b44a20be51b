"""Training steps with and without `dataparallel.trace` around them, and what the trace says of them.

This module compares and judges nothing. That is done by `test_trace.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dataparallel
from dataparallel import DataParallel, profiling
from dataparallel.composable import replicate
from dataparallel.tracing.results import Results
from digits import TrainingRun
from shapes import NARROW_GPT
from sharded_blocks import sharded
from stages import mean_square

STEPS = 3
"""Steps of a GPT inside of one block. An epoch of the digits has 12."""


@dataclass
class Traced:
    """Some steps of one training, which are the same work each time.

    `found` has what traces have said, and `clocked` the seconds of the same steps by another clock.
    """

    name: str
    slots: Sequence[torch.device]
    steps: Callable[[], object]
    found: list[Results] = field(default_factory=list)
    clocked: list[float] = field(default_factory=list)

    def untraced(self) -> None:
        self.steps()

    def traced(self) -> None:
        """The tables are not made here: they are made where somebody reads them."""
        with dataparallel.trace() as trace:
            begin = time.perf_counter()
            self.steps()
            end = time.perf_counter()
        self.clocked.append(end - begin)
        self._last = trace

    def read(self) -> None:
        """Has the results of the last block made."""
        self.found.append(self._last.results)

    @property
    def uncounted(self) -> float:
        """The largest part of a block, by the outer clock, that the exclusive times of a trace do not explain."""
        pairs = zip(self.found, self.clocked, strict=True)
        return max(abs(1 - sum(stage.seconds for stage in found.stages) / clocked) for found, clocked in pairs)


def digits(slots: Sequence[torch.device]) -> Traced:
    """An epoch of the digits' training, by ``DataParallel``."""
    run = TrainingRun(slots, epochs=1000)
    return Traced("digits, DataParallel", slots, run.train_epoch)


def gpt(form: str, slots: Sequence[torch.device]) -> Traced:
    """Steps of the narrow GPT with AdamW, by one of the forms."""
    module = NARROW_GPT.model().to(slots[0])
    batch: Tensor = NARROW_GPT.batch(16).to(slots[0])
    if form == "fully_shard":
        model = sharded(module, list(slots))
    else:
        model = replicate(module, devices=slots) if form == "replicate" else DataParallel(module, list(slots))
    optimizer = torch.optim.AdamW(model.parameters())

    def steps() -> None:
        for _ in range(STEPS):
            loss = mean_square(model(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Traced(f"GPT of width 24, {form}", slots, steps)


def seconds_of_a_range(repeats: int = 20_000) -> float:
    """What a range costs while nobody records, beside an empty loop. The shortest of several tries."""
    assert profiling.recorder is None
    shortest = [float("inf")] * 2
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(repeats):
            with profiling.stage("scatter"):
                pass
        middle = time.perf_counter()
        for _ in range(repeats):
            pass
        end = time.perf_counter()
        shortest = [min(shortest[0], middle - begin), min(shortest[1], end - middle)]
    return (shortest[0] - shortest[1]) / repeats
