"""What remains of a wrapper that costs nothing: copies of the module and of the chunks that are already on the devices.

Nothing is scattered, replicated, gathered or summed, and no setting of the caller is carried over. No library that runs
replicas in threads of one process can be much faster on the same machine. So torch's time over this one is about the
largest ratio that a comparison with torch can show there. It does not train: each copy keeps its own gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradients import assert_same_gradients, gradients_of
from stages import mean_square

R = TypeVar("R")


class ReadyReplicas:
    """Copies of ``module`` on ``devices``. ``threads`` threads run them in slot order; if it is 1, the caller does."""

    def __init__(self, module: nn.Module, batch: Tensor, devices: Sequence[torch.device], threads: int) -> None:
        self._replicas = [copy.deepcopy(module).to(device) for device in devices]
        self._chunks = [chunk.to(device) for chunk, device in zip(batch.chunk(len(devices)), devices, strict=True)]
        self._devices = list(devices)
        # Without this, operators in a new thread use all cores.
        initializer = partial(torch.set_num_threads, torch.get_num_threads())
        self._pool = ThreadPoolExecutor(threads, initializer=initializer) if threads > 1 else None

    def infer(self) -> None:
        self._on_each(self._outputs)

    def train(self) -> None:
        """A step on each device. The engine runs the backward passes of all devices at the same time."""
        torch.autograd.backward(self._on_each(self._losses))
        for replica in self._replicas:
            replica.zero_grad()

    def check(self, module: nn.Module, batch: Tensor) -> None:
        """Raises `AssertionError` unless outputs and sums of gradients are those of ``module``, chunk after chunk."""
        for slot, chunk in enumerate(batch.chunk(len(self._devices))):
            torch.testing.assert_close(self._outputs(slot).to(batch.device), module(chunk))
        torch.autograd.backward(self._on_each(self._losses))
        for chunk in batch.chunk(len(self._devices)):
            (mean_square(module(chunk)) / len(self._devices)).backward()
        totals = [
            torch.stack([gradient.to(batch.device) for gradient in found]).sum(0)
            for found in zip(*map(gradients_of, self._replicas), strict=True)
        ]
        assert_same_gradients(totals, gradients_of(module))
        for network in (module, *self._replicas):
            network.zero_grad()

    def _outputs(self, slot: int) -> Tensor:
        return self._replicas[slot](self._chunks[slot])

    def _losses(self, slot: int) -> Tensor:
        return mean_square(self._outputs(slot)) / len(self._devices)

    def _on_each(self, call: Callable[[int], R]) -> list[R]:
        recording = torch.is_grad_enabled()

        def run(slot: int) -> R:
            with torch.set_grad_enabled(recording), torch.accelerator.device_index(self._devices[slot].index):
                return call(slot)

        return list((map if self._pool is None else self._pool.map)(run, range(len(self._devices))))
