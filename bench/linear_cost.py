"""The cost on the host for a growing number of slots and of parameters: a script, and what it measures.

``python linear_cost.py SLOT_ROUNDS MOST_SLOTS PARAMETER_ROUNDS MOST_PARAMETERS`` simulates as many devices as it needs,
which is more than other benchmarks do, and prints CPU seconds as JSON. The models are layer norms of 4 features in a
row: as many parameters as wanted, next to nothing to compute, and one operator for two parameters. The choice of how
many replicas run at once is left out (``workers=1``). This module fits no line and judges nothing. That is done by
`linear_cost_report.py`.

Times are CPU time of all threads of the process. A call of two seconds is never left alone on a machine that does other
things too, and CPU time suffers less from that than time on the clock.
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
from gradients import assert_same_gradients, gradients_of
from nogpu import SimulationUnavailable, simulate

SLOTS = (1, 2, 4, 8, 16, 24, 32)
PARAMETERS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
FIXED_SLOTS = 4  # where the number of parameters grows
FIXED_PARAMETERS = 100  # where the number of slots grows
FEATURES = 4
SAMPLES_PER_SLOT = 2
CALLS = ("replicate", "inference", "training")


@dataclass
class Size:
    """A model of ``parameters`` parameters on ``slots`` devices. ``seconds`` has the CPU times of each call."""

    slots: int
    parameters: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def fastest(self, call: str) -> float:
        """The best estimate: whatever else the machine does only adds to the time."""
        return min(self.seconds[call])


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
    """The three calls for one size, and their check."""

    def __init__(self, size: Size, devices: list[torch.device]) -> None:
        self.size = size
        self.slots = devices[: size.slots]
        self.model = chain(size.parameters).to(self.slots[0])
        # How many replicas run at a time is another question.
        self.wrapped = DataParallel(self.model, self.slots, workers=1)
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randn(SAMPLES_PER_SLOT * size.slots, FEATURES, generator=generator).to(self.slots[0])

    def replicate(self) -> None:
        """Makes replicas and lets go of them."""
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
    """Every call of every size has two turns in a round. Results are checked before and after.

    A round goes up the sizes and down again, so that each call follows one of its own or of a neighbouring size. The
    first call after a much larger one would pay for memory that was freed, but not yet sorted.
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
    """The CPU seconds of all threads of the process for each of ``calls``, after a round without timing.

    This is `pairs.take_turns` with another clock.
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
