"""The work that the library and ``torch.nn.parallel`` both do, on the same module, batch and devices.

Replicating, inference and a training step without its optimizer are callables to be timed. Checks show that both do
all of the work: every tensor of every replica is there, and outputs and gradients are those of one device. This module
compares and judges no times. That is done by `test_beside_torch.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

import dataparallel
from dataparallel import DataParallel
from gradients import assert_same_gradients, gradients_of, mean_square, take_gradients
from pairs import Call, Comparison, load, take_turns
from shapes import Shape
from torch_pipeline import StandIns

SAMPLES_PER_DEVICE = 2
SETTLE, SHORT_SETTLE = 16, 2
"""Calls in which the library chooses how many replicas run at a time."""

OURS, TORCH, IN_A_ROW = "ours", "torch", "in a row"
R = TypeVar("R")


@dataclass(frozen=True)
class Timed:
    """The seconds of one piece of work by several ways, which took turns.

    ``copies`` is the part of torch's that was spent in plain copies; empty where torch has its own.
    """

    seconds: dict[str, list[float]]
    copies: list[float]
    load_before: float
    load_after: float

    def compared(self, one: list[float], other: list[float]) -> Comparison:
        return Comparison(one, other, self.load_before, self.load_after)


class BesideTorch:
    """One module in two wrappers on ``devices``, with a batch of 2 samples for each device.

    Calls of torch's need ``stand_ins`` installed; `time` and the checks do that.
    """

    def __init__(self, shape: Shape, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32) -> None:
        self.devices = list(devices)
        self.module = shape.model().to(self.devices[0], dtype)
        batch = shape.batch(SAMPLES_PER_DEVICE * len(self.devices)).to(self.devices[0])
        self.batch = batch.to(dtype) if batch.is_floating_point() else batch
        self.ours = DataParallel(self.module, device_ids=self.devices)
        self.theirs = nn.DataParallel(self.module, device_ids=[device.index for device in self.devices])
        self.stand_ins = StandIns(self.devices[0].type)
        self.held: Sequence[nn.Module] = ()

    # What is timed.

    def replicate(self) -> list[nn.Module]:
        return dataparallel.replicate(self.module, self.devices)

    def torch_replicate(self) -> list[nn.Module]:
        return nn.parallel.replicate(self.module, self.theirs.device_ids)

    def wrapper_replicate(self, wrapper: nn.DataParallel, end: bool = False) -> None:
        """The first stage of a wrapper. With ``end`` the replicas are dropped, as at the end of a call."""
        self.held = wrapper.replicate(self.module, wrapper.device_ids)
        if end:
            self.end()

    def end(self) -> None:
        self.held = ()

    def infer(self) -> None:
        self.ours(self.batch)

    def torch_infer(self) -> None:
        self.theirs(self.batch)

    def infer_in_a_row(self) -> None:
        """The chunks one after the other on the first device."""
        for chunk in self.batch.chunk(len(self.devices)):
            self.module(chunk)

    def train(self) -> None:
        mean_square(self.ours(self.batch)).backward()
        self.module.zero_grad()

    def torch_train(self) -> None:
        mean_square(self.theirs(self.batch)).backward()
        self.module.zero_grad()

    def train_in_a_row(self) -> None:
        """A step for each chunk on the first device, with gradients accumulated."""
        for chunk in self.batch.chunk(len(self.devices)):
            (mean_square(self.module(chunk)) / len(self.devices)).backward()
        self.module.zero_grad()

    def time(
        self, calls: Mapping[str, Call], pairs: int, settle: int, short: bool, between: Call = lambda: None
    ) -> Timed:
        """The calls take turns, after ``settle`` calls of `OURS`, in which the library makes its choices."""
        counted, copies = self.stand_ins.count(calls[TORCH])
        before = load()
        with self.stand_ins.installed():
            for _ in range(settle):
                calls[OURS]()
                between()
            turns = {**calls, TORCH: counted}
            seconds = dict(zip(turns, take_turns([*turns.values()], pairs, between=between, short=short), strict=True))
        return Timed(seconds, copies[-len(seconds[TORCH]) :] if self.stand_ins.needed else [], before, load())

    # What is checked, outside of any timing.

    def check_replicas(self) -> None:
        """Raises `AssertionError` unless each tensor of each replica has the source's value on its own device."""
        with self.stand_ins.installed():
            for make in (self.replicate, self.torch_replicate):
                check_tensors(self.module, make(), self.devices)
            for wrapper in (self.ours, self.theirs):
                self.wrapper_replicate(wrapper)
                check_tensors(self.module, self.held, self.devices)
                self.end()

    def check_inference(self) -> None:
        """Raises `AssertionError` unless the outputs are those of one device."""
        expected = torch.cat([self.module(chunk) for chunk in self.batch.chunk(len(self.devices))])
        with self.stand_ins.installed():
            for wrapper in (self.ours, self.theirs):
                torch.testing.assert_close(wrapper(self.batch), expected)

    def check_training(self) -> None:
        """Raises `AssertionError` unless outputs and gradients are those of the chunks in a row on one device."""
        self.module.zero_grad()
        outputs = []
        for chunk in self.batch.chunk(len(self.devices)):
            outputs.append(self.module(chunk))
            (mean_square(outputs[-1]) / len(self.devices)).backward()
        expected = torch.cat(outputs).detach()
        gradients = take_gradients(self.module)
        with self.stand_ins.installed():
            for wrapper in (self.ours, self.theirs):
                output = wrapper(self.batch)
                mean_square(output).backward()
                torch.testing.assert_close(output.detach(), expected)
                assert_same_gradients(take_gradients(self.module), gradients)


class ReadyReplicas:
    """What remains of a wrapper that costs nothing: copies of a module, and chunks, that are on their devices already.

    ``threads`` threads run them in slot order; if it is 1, the caller does. Nothing is scattered, replicated, gathered
    or summed, and no setting of the caller is carried over. No library that runs replicas in threads of one process can
    be much faster on the same machine. It does not train: each copy keeps its own gradients.
    """

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


def check_tensors(source: nn.Module, replicas: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raises `AssertionError` unless each replica holds an equal tensor on its device for each tensor of the source."""
    tensors = dict(itertools.chain(source.named_parameters(), source.named_buffers()))
    for device, replica in zip(devices, replicas, strict=True):
        for name, expected in tensors.items():
            path, _, last = name.rpartition(".")
            tensor = getattr(replica.get_submodule(path), last)  # a replica of torch lists no parameters
            assert tensor.device == device, f"{name} on {device}"
            assert torch.equal(tensor.detach().cpu(), expected.detach().cpu()), f"{name} on {device}"
