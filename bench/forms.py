"""One model in each of the library's forms and in torch's wrapper: training steps to be timed, and their check."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from beside_torch import BesideTorch
from dataparallel.composable import replicate
from gradients import assert_same_gradients, take_gradients
from shapes import Shape
from stages import mean_square


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
