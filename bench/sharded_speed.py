"""What is timed in this process to judge `fully_shard`: launch-bound steps, and models with more and more units.

Builds the work and checks it. `test_sharded_speed.py` times it, and `sharded_speed_report.py` judges. Steps of a model
that spends its time in its operators are made in processes of their own, by `sharded_contender`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from beside_torch import SAMPLES_PER_DEVICE
from dataparallel.composable import replicate
from gradients import assert_same_gradients, take_gradients
from shapes import GPT, NARROW_GPT, VOCABULARY
from sharded_blocks import full, full_gradients, sharded
from stages import mean_square

RATE = 1e-4
UNITS = (3, 6, 12, 24)  # blocks; the root is one more
UNITS_DEVICES = 4
WIDTH = 24


class ShardedSteps:
    """A narrow GPT on ``devices``, sharded, replicated and alone, with AdamW. All begin with the same parameters.

    A step in a row is made by the module alone on the first device: as many single steps as there are devices, each
    with one device's samples, and each a whole step.
    """

    def __init__(self, module: nn.Module, batch: Tensor, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.alone = module.to(self.devices[0])
        self.batch = batch.to(self.devices[0])
        self.sharded = sharded(copy.deepcopy(self.alone), self.devices)
        self.replicated = replicate(copy.deepcopy(self.alone), devices=self.devices)
        networks = (self.alone, self.sharded, self.replicated)
        self._optimizers = {network: torch.optim.AdamW(network.parameters(), lr=RATE) for network in networks}

    def step(self) -> None:
        self._step(self.sharded, self.batch)

    def step_replicated(self) -> None:
        self._step(self.replicated, self.batch)

    def steps_in_a_row(self) -> None:
        for chunk in self._chunks():
            self._step(self.alone, chunk)

    def backward(self) -> None:
        """A step without its optimizer."""
        mean_square(self.sharded(self.batch)).backward()
        self.sharded.zero_grad()

    def backward_in_a_row(self) -> None:
        """The same for the chunks one after the other on the first device, which adds their gradients."""
        self._backward_in_a_row()
        self.alone.zero_grad()

    def check(self) -> None:
        """Raises `AssertionError` unless the sharded module has the gradients of the module alone.

        The module alone gets the sharded module's parameters, whatever steps the two have made.
        """
        with torch.no_grad():
            for parameter, found in zip(self.alone.parameters(), self.sharded.parameters(), strict=True):
                parameter.copy_(full(found))
        self.alone.zero_grad()
        self.sharded.zero_grad()
        self._backward_in_a_row()
        mean_square(self.sharded(self.batch)).backward()
        assert_same_gradients(full_gradients(self.sharded), take_gradients(self.alone), rtol=1e-3, atol=1e-3)
        self.sharded.zero_grad()

    def _step(self, network: nn.Module, batch: Tensor) -> None:
        optimizer = self._optimizers[network]
        optimizer.zero_grad()
        mean_square(network(batch)).backward()
        optimizer.step()

    def _backward_in_a_row(self) -> None:
        for chunk in self._chunks():
            (mean_square(self.alone(chunk)) / len(self.devices)).backward()

    def _chunks(self) -> tuple[Tensor, ...]:
        return self.batch.chunk(len(self.devices))


def launch_bound(devices: Sequence[torch.device]) -> ShardedSteps:
    """12 blocks of width 24."""
    return ShardedSteps(NARROW_GPT.model(), NARROW_GPT.batch(SAMPLES_PER_DEVICE * len(devices)), devices)


@dataclass
class Growth:
    """The CPU seconds of a sharded step and of as many single steps as devices, with so many blocks."""

    blocks: int
    sharded: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)


def of_blocks(blocks: int, devices: Sequence[torch.device]) -> ShardedSteps:
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = GPT(WIDTH, blocks)
    samples = SAMPLES_PER_DEVICE * len(devices)
    return ShardedSteps(module, torch.randint(VOCABULARY, (samples, 32), generator=generator), devices)
