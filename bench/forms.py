"""One model in each of the library's forms and in torch's wrapper: training steps to be timed, and their check.

`Forms` is enough for whoever compares no sharded models.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from beside_torch import BesideTorch
from dataparallel.composable import replicate
from gradients import assert_same_gradients, mean_square, take_gradients
from shapes import Shape
from sharded_blocks import full_gradients, sharded


class Forms(BesideTorch):
    """`BesideTorch` with a copy of the module that `dataparallel.composable.replicate` has changed."""

    def __init__(self, shape: Shape, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, devices, dtype)
        self.replicated = replicate(copy.deepcopy(self.module), devices=self.devices)

    def infer_replicated(self) -> None:
        self.replicated(self.batch)

    def train_replicated(self) -> None:
        mean_square(self.replicated(self.batch)).backward()
        self.replicated.zero_grad()

    def check_replicated(self) -> None:
        """Raises `AssertionError` unless output and gradients of the replicated module are those of the wrapper."""
        outputs, gradients = [], []
        for call, module in ((self.ours, self.module), (self.replicated, self.replicated)):
            module.zero_grad()
            outputs.append(call(self.batch))
            mean_square(outputs[-1]).backward()
            gradients.append(take_gradients(module))
        wanted, found = outputs
        torch.testing.assert_close(found.detach(), wanted.detach())
        assert_same_gradients(gradients[1], gradients[0])


class ShardedForms(Forms):
    """`Forms` with two copies that `fully_shard` has changed; one of them keeps its weights until backward."""

    def __init__(self, shape: Shape, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, devices, dtype)
        self.sharded = sharded(copy.deepcopy(self.module), self.devices)
        self.not_resharded = sharded(copy.deepcopy(self.module), self.devices, reshard_after_forward=False)

    def train_sharded(self) -> None:
        mean_square(self.sharded(self.batch)).backward()
        self.sharded.zero_grad()

    def train_not_resharded(self) -> None:
        mean_square(self.not_resharded(self.batch)).backward()
        self.not_resharded.zero_grad()

    def check_sharded(self) -> None:
        """Raises `AssertionError` unless outputs and gradients of both are those of the wrapper."""
        self.module.zero_grad()
        wanted = self.ours(self.batch)
        mean_square(wanted).backward()
        gradients = take_gradients(self.module)
        for module in (self.sharded, self.not_resharded):
            module.zero_grad()
            found = module(self.batch)
            mean_square(found).backward()
            torch.testing.assert_close(found.detach(), wanted.detach())
            assert_same_gradients(full_gradients(module), gradients)
            module.zero_grad()
