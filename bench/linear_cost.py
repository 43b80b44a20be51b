"""Host costs for a growing number of slots, and of parameters. Run as a script it is a process of its own.

``python linear_cost.py SLOT_ROUNDS MOST_SLOTS PARAMETER_ROUNDS MOST_PARAMETERS`` simulates as many devices as it needs,
more than other benchmarks do, and prints CPU seconds as JSON. The models have many tiny parameters, so that what
remains is what their number costs. Fits no line and judges nothing: that is for `linear_cost_report.py`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from dataparallel import DataParallel, replicate
from dataparallel.testing import SimulationUnavailable, simulate
from gradients import assert_same_gradients, gradients_of

SLOTS = (1, 2, 4, 8, 16, 24, 32)
PARAMETERS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
FIXED_SLOTS = 4  # where the number of parameters grows
FIXED_PARAMETERS = 100  # where the number of slots grows
FEATURES = 4
SAMPLES_PER_SLOT = 2
CALLS = ("replicate", "inference", "training")


@dataclass
class Size:
    """A model of ``parameters`` parameters on ``slots`` devices; ``seconds`` has the CPU time of each call's turns."""

    slots: int
    parameters: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def fastest(self, call: str) -> float:
        """What else the machine does, to caches and clock rates, only adds to it."""
        return min(self.seconds[call])


def chain(parameters: int) -> nn.Module:
    """One operator for two parameters. Neither values nor gradients grow or vanish in layer norms in a row."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.LayerNorm(FEATURES) for _ in range(parameters // 2)))
    with torch.no_grad():
        for parameter in model.parameters():  # each its own, so that none can be taken for another
            parameter.add_(torch.randn(FEATURES, generator=generator), alpha=0.01)
    return model


def loss_of(output: Tensor) -> Tensor:
    """One feature, because the squares of a normalised sample always have the same sum."""
    return output[:, 0].mean()


class Work:
    """The three calls for one size."""

    def __init__(self, size: Size, devices: list[torch.device]) -> None:
        self.size = size
        self.slots = devices[: size.slots]
        self.model = chain(size.parameters).to(self.slots[0])
        # The choice of the number of permits is left out: it is another question.
        self.wrapped = DataParallel(self.model, self.slots, workers=1)
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randn(SAMPLES_PER_SLOT * size.slots, FEATURES, generator=generator).to(self.slots[0])

    def replicate(self) -> None:
        """Makes them and lets go of them."""
        replicate(self.model, self.slots)

    def inference(self) -> Tensor:
        with torch.no_grad():
            return self.wrapped(self.batch)

    def training(self) -> None:
        self.model.zero_grad()
        loss_of(self.wrapped(self.batch)).backward()

    def calls(self) -> list[Callable[[], object]]:
        return [getattr(self, call) for call in CALLS]

    def check(self) -> None:
        """Raises `AssertionError` unless replicas, output and gradients are those of the module by itself."""
        self.model.zero_grad()
        expected = self.model(self.batch)
        loss_of(expected).backward()
        gradients = gradients_of(self.model)
        self.training()
        assert_same_gradients(gradients_of(self.model), gradients, rtol=1e-3, atol=1e-3)
        self.model.zero_grad()
        torch.testing.assert_close(self.inference(), expected.detach())
        for replica, slot in zip(replicate(self.model, self.slots), self.slots, strict=True):
            for copy, parameter in zip(replica.parameters(), self.model.parameters(), strict=True):
                assert copy.device == slot
                assert torch.equal(copy.detach().cpu(), parameter.detach().cpu())


def measure(sizes: list[Size], devices: list[torch.device], rounds: int) -> None:
    """Every call of every size has two turns in a round; results are checked before and after.

    A round goes up the sizes and down again, so that each comes after one of its own size or a neighbour: the first
    call after a much larger one pays for memory that has been freed, but not yet sorted.
    """
    all_work = [Work(size, devices) for size in sizes]
    calls = [call for work in all_work for call in work.calls()]

    def check() -> None:
        for work in all_work:
            work.check()

    check()
    with torch.sim.clocks(False):
        seconds = take_turns_on_the_cpu([*calls, *reversed(calls)], rounds)
    check()
    upwards, downwards = iter(seconds), reversed(seconds)
    for size in sizes:
        size.seconds = {call: next(upwards) + next(downwards) for call in CALLS}


def take_turns_on_the_cpu(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """The seconds that all threads of the process have computed for each of ``calls``, after a round without timing.

    As `pairs.take_turns`, but for the clock: a call of two seconds is never left alone on a machine that does other
    things too, so that long calls would seem to take longer than short ones by more than they do.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.freeze()
    for number in range(-1, rounds):
        for call, own in zip(calls, seconds, strict=True):
            gc.collect()
            start = time.process_time()
            call()
            if number >= 0:
                own.append(time.process_time() - start)
    gc.unfreeze()
    return seconds


def main(slot_rounds: str, most_slots: str, parameter_rounds: str, most_parameters: str) -> None:
    torch.set_num_threads(1)
    by_slots = [Size(slots, FIXED_PARAMETERS) for slots in SLOTS if slots <= int(most_slots)]
    by_parameters = [Size(FIXED_SLOTS, number) for number in PARAMETERS if number <= int(most_parameters)]
    try:
        devices = simulate(max(size.slots for size in by_slots + by_parameters))
    except SimulationUnavailable as error:
        print(json.dumps({"why_not": str(error)}))
        return
    measure(by_slots, devices, int(slot_rounds))
    measure(by_parameters, devices, int(parameter_rounds))
    print(json.dumps({"slots": list(map(asdict, by_slots)), "parameters": list(map(asdict, by_parameters))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
