"""A training step stage by stage: scatter, replicate, parallel_apply, gather, backward, each timed alone.

The stages are called as `DataParallel` calls them, on every number of devices, one included, where the wrapper itself
just calls the module. Compares and judges nothing: that is for `stages_report.py` and `test_stages.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from gradients import assert_same_gradients, gradients_of
from ways import ByHand

STAGES = ("scatter", "replicate", "parallel_apply", "gather", "backward")


def mean_square(output: Tensor) -> Tensor:
    """A loss that needs no labels."""
    return output.square().mean()


class Stopwatch:
    """Adds up the seconds of named stretches, each from when the devices are idle until they are idle again."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        for device in self.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self.seconds[name] = time.perf_counter() - start


@dataclass
class StagedTraining:
    """Training steps without their optimizer, so that all steps are the same one.

    `module` and `batch` are on the first of `devices`. `steps` has for each step so far the seconds of each stage, of
    the whole "step", and of the same step "by hand": the same chunks, without the library, on the first device.
    """

    module: nn.Module
    batch: Tensor
    devices: list[torch.device]
    steps: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Its stages are called one by one, for what it keeps and chooses from call to call.
        self.parallel = DataParallel(self.module, self.devices)

    def step(self) -> tuple[Tensor, list[Tensor]]:
        """One step by the stages; returns output and gradients."""
        watch = Stopwatch(self.devices)
        self.module.zero_grad()
        with watch.time("step"):
            with watch.time("scatter"):
                inputs, kwargs = self.parallel.scatter((self.batch,), {}, self.devices)
            with watch.time("replicate"):
                replicas = self.parallel.replicate(self.module, self.devices)
            with watch.time("parallel_apply"):
                outputs = self.parallel.parallel_apply(replicas, inputs, kwargs)
            with watch.time("gather"):
                output = self.parallel.gather(outputs, self.devices[0])
            # The wrapper lets go of them here too. It takes a moment, which only "step" shows.
            del inputs, kwargs, replicas, outputs
            loss = mean_square(output)
            with watch.time("backward"):
                loss.backward()
        self.steps.append(watch.seconds)
        return output.detach(), gradients_of(self.module)

    def step_by_hand(self) -> tuple[Tensor, list[Tensor]]:
        """The same step without the library, noted with the last one by the stages."""
        watch = Stopwatch(self.devices[:1])
        self.module.zero_grad()
        with watch.time("by hand"):
            output = ByHand(self.module, len(self.devices))(self.batch)
            mean_square(output).backward()
        self.steps[-1] |= watch.seconds
        return output.detach(), gradients_of(self.module)

    def check(self) -> None:
        """Raises `AssertionError` unless a step by the stages gives what the one by hand gives."""
        output, gradients = self.step()
        expected_output, expected_gradients = self.step_by_hand()
        torch.testing.assert_close(output, expected_output)
        assert_same_gradients(gradients, expected_gradients)

    def seconds(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]


def staged(build: Callable[[], nn.Module], batch: Tensor, devices: Sequence[torch.device]) -> StagedTraining:
    """A training of a new module on `devices`."""
    return StagedTraining(build().to(devices[0]), batch.to(devices[0]), list(devices))
