"""What one more tensor, module or slot costs the host, by each form and by torch: a script, and what it measures.

``python cost_slopes.py ROUNDS MOST`` simulates 8 devices, and prints CPU seconds as JSON. Sizes of each `Growth` go up
to MOST. Every way of every size has two turns in a round. `test_cost_slopes.py` fits lines. Times are CPU time of all
threads of the process, which suffers less from other programs than time on the clock.

The model is a row of layer norms of 4 features: as many parameters as wanted, next to nothing to compute. Besides its
batch a call may have further tensors, which are split and sent, and which nothing computes with. The
library runs one replica at a time (``workers=1``): how many is another question.

``torch.nn.DataParallel`` runs with plain copies in place of its own (`torch_pipeline`), which are part of its time.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from gradients import assert_same_gradients, gradients_of
from nogpu import SimulationUnavailable, simulate
from shapes import InARow
from sharded_blocks import full_gradients
from torch_pipeline import StandIns

DEVICES = 8
FEATURES = 4
SAMPLES_PER_SLOT = 2
INFERENCE, STEP = "inference", "step"
IN_A_ROW, TORCH = "in a row", "torch.nn.DataParallel"
WRAPPER, FROZEN, REPLICATE, SHARD = "DataParallel", "DataParallel, frozen", "replicate", "fully_shard"
WAYS = {
    INFERENCE: (IN_A_ROW, TORCH, WRAPPER, FROZEN, REPLICATE, SHARD),
    STEP: (IN_A_ROW, TORCH, WRAPPER, REPLICATE, SHARD),
}


@dataclass(frozen=True)
class Size:
    """How many slots there are, modules in the model, and tensors besides the batch."""

    slots: int = 4
    modules: int = 10
    tensors: int = 0


@dataclass(frozen=True)
class Growth:
    """What grows, which is a field of `Size`, and its numbers. The other fields have their defaults."""

    what: str
    numbers: tuple[int, ...]

    def sizes(self, most: int) -> list[Size]:
        return [Size(**{self.what: number}) for number in self.numbers if number <= most]


GROWTHS = (
    Growth("tensors", (0, 1, 10, 100, 1000)),
    Growth("modules", (1, 10, 30, 100, 300)),
    Growth("slots", (2, 4, 8)),
)


@dataclass
class Timed:
    """CPU seconds of one kind of work by one way: for each number of what grows its turns."""

    grows: str
    work: str
    way: str
    numbers: list[int] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)


class WithMore(nn.Module):
    """``model``, and further tensors that are there for being sent."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.model(x)


def chain(parameters: int) -> nn.Module:
    """Layer norms in a row, in which neither values nor gradients grow or vanish."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.LayerNorm(FEATURES) for _ in range(parameters // 2)))
    with torch.no_grad():
        for parameter in model.parameters():  # all different, so that none can be mistaken for another
            parameter.add_(torch.randn(FEATURES, generator=generator), alpha=0.01)
    return model


def loss_of(output: Tensor) -> Tensor:
    """The mean of one feature. The squares of all would not do: in a normalised sample their sum is constant."""
    return output[:, 0].mean()


class Work:
    """One kind of work of one size by one way. ``stack`` closes what the way has opened."""

    def __init__(self, size: Size, work: str, way: str, devices: Sequence[torch.device], stack: ExitStack) -> None:
        self.work, self.way = work, way
        slots = list(devices[: size.slots])
        self.module = WithMore(chain(2 * size.modules)).to(slots[0])  # a layer norm has two parameters
        self.plain = copy.deepcopy(self.module)
        self.network = self._made(slots, stack)
        generator = torch.Generator().manual_seed(1)
        shape = size.tensors + 1, SAMPLES_PER_SLOT * size.slots, FEATURES
        self.inputs = [one.clone() for one in torch.randn(shape, generator=generator).to(slots[0])]

    def _made(self, slots: list[torch.device], stack: ExitStack) -> nn.Module:
        if self.way == IN_A_ROW:
            return InARow(self.module, len(slots))
        if self.way == TORCH:
            return nn.DataParallel(self.module, device_ids=[device.index for device in slots])
        if self.way == REPLICATE:
            return replicate(self.module, devices=slots, workers=1)
        if self.way == SHARD:
            return fully_shard(self.module, devices=slots, workers=1)
        wrapper = DataParallel(self.module, slots, workers=1)
        if self.way == FROZEN:
            stack.enter_context(wrapper.options.frozen())
        return wrapper

    def call(self) -> Tensor:
        if self.work == INFERENCE:
            with torch.no_grad():
                return self.network(*self.inputs)
        self.module.zero_grad()
        output = self.network(*self.inputs)
        loss_of(output).backward()
        return output

    def check(self) -> None:
        """Raises `AssertionError` unless output and gradients are those of a copy of the module on one device."""
        expected = self.plain(*self.inputs)
        torch.testing.assert_close(self.call().detach(), expected.detach())
        if self.work == STEP:
            self.plain.zero_grad()
            loss_of(expected).backward()
            found = full_gradients(self.module) if self.way == SHARD else gradients_of(self.module)
            assert_same_gradients(found, gradients_of(self.plain), rtol=1e-3, atol=1e-3)


def cpu_seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """CPU seconds of each of ``calls``, which have two turns in a round, after a round without timing.

    A round goes up the calls and down again, so that each call follows one of its own or of a neighbouring size. The
    first call after a much larger one would pay for memory that was freed, but not yet sorted.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    order = [*range(len(calls)), *reversed(range(len(calls)))]
    gc.collect()
    gc.freeze()
    for number in range(-1, rounds):
        for place in order:
            gc.collect()
            start = time.process_time()
            calls[place]()
            if number >= 0:
                seconds[place].append(time.process_time() - start)
    gc.unfreeze()
    return seconds


def measure(growth: Growth, most: int, devices: Sequence[torch.device], rounds: int) -> list[Timed]:
    """All ways of a size come one after the other."""
    sizes = growth.sizes(most)
    cases = [(size, work, way) for size in sizes for work, ways in WAYS.items() for way in ways]
    with ExitStack() as stack:
        stack.enter_context(StandIns("sim").installed())
        all_work = [Work(size, work, way, devices, stack) for size, work, way in cases]
        for work in all_work:
            work.check()
        with torch.sim.clocks(False):
            seconds = cpu_seconds([work.call for work in all_work], rounds)
        for work in all_work:
            work.check()
    found: dict[tuple[str, str], Timed] = {}
    for (size, work, way), turns in zip(cases, seconds, strict=True):
        timed = found.setdefault((work, way), Timed(growth.what, work, way))
        timed.numbers.append(getattr(size, growth.what))
        timed.seconds.append(turns)
    return list(found.values())


def main(rounds: str, most: str) -> None:
    torch.set_num_threads(1)
    try:
        devices = simulate(DEVICES)
    except SimulationUnavailable as error:
        print(json.dumps({"why_not": str(error)}))
        return
    found = [timed for growth in GROWTHS for timed in measure(growth, int(most), devices, int(rounds))]
    print(json.dumps({"timed": list(map(asdict, found))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
