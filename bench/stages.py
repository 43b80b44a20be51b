"""A training step stage by stage: scatter, replicate, parallel_apply, gather, backward, each timed by itself.

The stages are called as `DataParallel` calls them, also on one device, where the wrapper just calls the module. This
module compares and judges nothing. That is done by `stages_report.py` and `test_stages.py`.
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
    """Times named parts of a step, each from idle devices to idle devices."""

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
    """Training steps without an optimizer, so that all steps are the same.

    `module` and `batch` are on the first of `devices`. `steps` has, for each step so far, the seconds of each stage, of
    the whole "step", and of the step "by hand": the same chunks on the first device without the library.
    """

    module: nn.Module
    batch: Tensor
    devices: list[torch.device]
    steps: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Its own stages are called, because it keeps replicas and chooses permits from call to call.
        self.parallel = DataParallel(self.module, self.devices)

    def step(self) -> tuple[Tensor, list[Tensor]]:
        """One step by the stages. Returns output and gradients."""
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
            # The wrapper lets go of them here too, which takes some time. Only "step" includes it.
            del inputs, kwargs, replicas, outputs
            loss = mean_square(output)
            with watch.time("backward"):
                loss.backward()
        self.steps.append(watch.seconds)
        return output.detach(), gradients_of(self.module)

    def step_by_hand(self) -> tuple[Tensor, list[Tensor]]:
        """The same step without the library. Its time is noted with that of the last step by the stages."""
        watch = Stopwatch(self.devices[:1])
        self.module.zero_grad()
        with watch.time("by hand"):
            output = ByHand(self.module, len(self.devices))(self.batch)
            mean_square(output).backward()
        self.steps[-1] |= watch.seconds
        return output.detach(), gradients_of(self.module)

    def check(self) -> None:
        """Raises `AssertionError` unless a step by the stages has the results of the step by hand."""
        output, gradients = self.step()
        expected_output, expected_gradients = self.step_by_hand()
        torch.testing.assert_close(output, expected_output)
        assert_same_gradients(gradients, expected_gradients)

    def seconds(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]


def staged(build: Callable[[], nn.Module], batch: Tensor, devices: Sequence[torch.device]) -> StagedTraining:
    """A training of a new module on `devices`."""
    return StagedTraining(build().to(devices[0]), batch.to(devices[0]), list(devices))
