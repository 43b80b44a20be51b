"""How much memory of each device a training takes, and how much is to be expected: bytes from the simulator's counters.

A step is forward, backward and AdamW. Nothing is timed here. `Parts` has what a model consists of, and `Way` the way to
train it with a formula for its peak. `row_of` makes a row of the table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from gradients import mean_square
from reporting import Cell
from shapes import GPT, VOCABULARY, Shape, WithLoss
from sharded_blocks import blocks_of, sharded

CAPTION = """\
Memory in MiB of the device that has most, counted by the simulator to the byte. A training step is forward, backward
and AdamW. The batch itself is not counted.

idle
    Between two steps, with gradients set to None: parameters and two averages of AdamW.
expected idle
    Three times the parameters, divided by the number of devices where they are sharded. Parts of other models have
    padding, of this one none: the width is a multiple of 64.
forward, backward, optimizer
    The largest amount during that part of a step.
expected peak
    The larger of two. In backward: shards of parameters, averages and gradients; the activations of a device's share;
    and what is not sharded. That is the root's weights, two units of weights, and two units of gradients, one of them
    on its way. Without prefetch it is one unit of weights, and the row of gradients that an owner receives. With
    reshard_after_forward=False it is all weights, with 2 half of them more. With no_sync it is all gradients more, and
    for the last two units the sums that are not yet added to gradients, and a row. In the optimizer: five times the
    shard, because its foreach operators have a temporary list. On one device nothing is sharded, so the shard is the
    whole. Units of at most 64 KiB add up to 512 KiB of such units, and the gradients of one from each device.
within
    Whether the peak is at most what is expected. For replicate the formula is that of one device.
received
    What a device gets from others in a step, on the device that gets most. Inputs are not counted.
of an all-reduce
    The same divided by what an all-reduce of the gradients brings to each device: 2 (N - 1) / N of their size. Units
    whose gradients are at most 64 KiB are added on one device, which gets them whole from all others."""

TABLE: dict[str, Cell] = {
    "model": "{model}",
    "devices": "{devices}",
    "way": "{way}",
    "idle": "{idle:.2fMiB}",
    "expected\nidle": "{expected_idle:.2fMiB}",
    "forward": "{forward:.2fMiB}",
    "backward": "{backward:.2fMiB}",
    "optimizer": "{optimizer:.2fMiB}",
    "expected\npeak": "{expected_peak:.2fMiB}",
    "within": "{within}",
    "received": "{received:.2fMiB}",
    "of an\nall-reduce": "{of_all_reduce:.2f}",
}

SAMPLES_PER_DEVICE = 2
LENGTH = 64
WIDTH, BLOCKS, HEADS = 256, 8, 4
STEPS_BEFORE, STEPS = 2, 3
"""In the first steps AdamW makes its state, and the library learns in which order units are used."""
RATE = 1e-4
STATES = 3
"""Of a parameter, between two steps of AdamW: itself and two averages."""
SMALL, ARRIVED = 2**16, 2**19
"""Bytes of a unit that is gathered for all devices at once, and of such units on a device before it comes to them."""
STEPS_IN_FLOAT64 = 3
AGREEMENT = 1e-9
"""Relative, of losses in float64. In float32 they may differ by more than 1e-3 after a few steps, because AdamW makes
steps of the same size for gradients that are rounding errors as for others."""


class MeanSquare(nn.Module):
    """The mean square of the outputs of ``model``, as a tensor of one element, so that only numbers are gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return mean_square(self.model(x)).unsqueeze(0)


@dataclass(frozen=True)
class Work:
    """A model that contains its loss, and inputs for so many samples."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]


def gpt() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WithLoss(GPT(WIDTH, BLOCKS, HEADS, LENGTH))


def text(samples: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WIDE_GPT = Work(f"GPT of {BLOCKS} blocks, width {WIDTH}", gpt, text)


def work_of(shape: Shape) -> Work:
    return Work(shape.name, lambda: MeanSquare(shape.model()), lambda samples: (shape.batch(samples),))


@dataclass(frozen=True)
class Parts:
    """Bytes of a model: parameters, those of the largest unit and of the root, buffers, and what a share activates.

    ``small_units``: those of each unit that is gathered for all devices at once.
    """

    parameters: int
    unit: int
    root: int
    buffers: int
    activations: int
    small_units: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """Bytes of the device that has most, without the batch.

    Attributes:
        idle: between two steps, gradients set to None.
        forward, backward, optimizer: the largest amount during that part of a step.
        received: from other devices in a step, without inputs.
    """

    idle: int
    forward: int
    backward: int
    optimizer: int
    received: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.optimizer)


Make = Callable[[nn.Module, Sequence[torch.device]], nn.Module]


@dataclass(frozen=True)
class Way:
    """A way to train, and what it may take of a device.

    Attributes:
        more: bytes at the peak besides shards, their gradients, buffers and activations, for so many devices.
        shards: whether parameters are spread over the devices.
        accumulates: a step has two batches, the first of them without sums of gradients.
        fits: whether it is a way to use so many devices.
    """

    name: str
    make: Make
    more: Callable[[Parts, int], int] = lambda parts, devices: 0
    shards: bool = True
    accumulates: bool = False
    fits: Callable[[int], bool] = lambda devices: True

    def idle(self, parts: Parts, devices: int) -> int:
        return STATES * parts.parameters // (devices if self.shards else 1) + parts.buffers

    def peak(self, parts: Parts, devices: int) -> int:
        """Of a step, or of the optimizer, whose foreach operators have a temporary list as large as the gradients.

        Small units may be on a device before it comes to them, and the gradients of one, from each device, are where
        they are added.
        """
        count = devices if self.shards else 1
        shard, more = parts.parameters // count, self.more(parts, devices)
        if count > 2 and parts.small_units:
            more += min(ARRIVED, sum(parts.small_units)) + count * max(parts.small_units)
        return parts.buffers + max((STATES + 1) * shard + parts.activations + more, (STATES + 2) * shard)


def with_options(**options: Any) -> Make:
    return lambda module, devices: sharded(module, devices, **options)


WAYS = (
    Way("one device", lambda module, devices: module, shards=False, fits=lambda devices: devices == 1),
    Way("replicate", lambda module, devices: replicate(module, devices=devices), shards=False),
    Way("fully_shard", sharded, lambda parts, n: parts.root + 4 * parts.unit),
    Way("no prefetch", with_options(prefetch=False), lambda parts, n: parts.root + 3 * parts.unit + parts.unit // n),
    Way(
        "reshard_after_forward=False",
        with_options(reshard_after_forward=False),
        lambda parts, n: parts.parameters + 2 * parts.unit,
    ),
    Way(
        "reshard_after_forward=2",
        with_options(reshard_after_forward=2),
        lambda parts, n: parts.root + (parts.parameters - parts.root) // 2 + 4 * parts.unit,
        fits=lambda devices: devices > 2 and devices % 2 == 0,
    ),
    Way(
        "no_sync, then a sum",
        sharded,
        lambda parts, n: parts.root + 4 * parts.unit + parts.parameters + 3 * parts.unit // n,
        accumulates=True,
    ),
)
WRAPPER = Way("DataParallel", DataParallel, shards=False)
NAMED = {way.name: way for way in (*WAYS, WRAPPER)}


class Training:
    """Steps of a way on devices. ``losses`` has that of each step."""

    def __init__(
        self, work: Work, way: Way, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32
    ) -> None:
        self.losses: list[float] = []
        self._accumulates = way.accumulates
        self._batch = batch_on(work, devices, dtype)
        self._network: Any = way.make(work.model().to(devices[0], dtype), devices)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=RATE)

    def run(self, after: Callable[[str], None] = lambda part: None) -> None:
        """One step, which says ``after`` each of its parts. Parts of an accumulated step come twice."""
        batches = 2 if self._accumulates else 1
        total = 0.0
        for number in range(batches):
            last = number == batches - 1
            with nullcontext() if last else self._network.no_sync():
                loss = self._network(*self._batch).mean() / batches
                after("forward")
                loss.backward()
                after("backward")
            total += loss.item()
            del loss
        self._optimizer.step()
        after("optimizer")
        self._optimizer.zero_grad()
        self.losses.append(total)


def batch_on(work: Work, devices: Sequence[torch.device], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """On the first of the devices, with the samples of all. ``dtype`` is for inputs that are no whole numbers."""
    batch = work.batch(SAMPLES_PER_DEVICE * len(devices))
    return tuple(tensor.to(devices[0], dtype if tensor.is_floating_point() else None) for tensor in batch)


def measure(work: Work, way: Way, devices: Sequence[torch.device], steps: int = STEPS) -> Usage:
    """The largest usage of some steps. Raises `AssertionError` unless losses are those of one device, in float64.

    Whatever else the process holds on the devices must stay as it is meanwhile.
    """
    wait_for(devices)
    inputs = batch_on(work, devices)
    batch = sum(tensor.nbytes for tensor in inputs)
    before = [torch.sim.memory_allocated(device) for device in devices]
    training = Training(work, way, devices)
    before[0] += batch  # the training has its own copy
    for _ in range(STEPS_BEFORE):
        training.run()
    most: dict[str, int] = {}

    def keep_largest(part: str) -> None:
        wait_for(devices)
        peaks = [torch.sim.max_memory_allocated(device) - held for device, held in zip(devices, before, strict=True)]
        most[part] = max(most.get(part, 0), *peaks)
        reset_peaks(devices)

    received = idle = 0
    for _ in range(steps):
        wait_for(devices)
        now = [torch.sim.memory_allocated(device) - held for device, held in zip(devices, before, strict=True)]
        idle = max(idle, *now)
        reset_peaks(devices)
        with torch.sim.counted() as counts:
            training.run(keep_largest)
            wait_for(devices)
        share = (1 + way.accumulates) * batch // len(devices)
        received = max(received, *(counts.received(device) - share * (device != devices[0]) for device in devices))
    del training
    assert_losses_of_one_device(work, way, devices)
    return Usage(idle, most["forward"], most["backward"], most["optimizer"], received)


def assert_losses_of_one_device(work: Work, way: Way, devices: Sequence[torch.device]) -> None:
    """Raises `AssertionError` unless a training in float64 has the losses of one device."""
    training = Training(work, way, devices, torch.float64)
    for _ in range(STEPS_IN_FLOAT64):
        training.run()
    expected = losses_of_one_device(work, devices[0], len(devices), STEPS_IN_FLOAT64)
    torch.testing.assert_close(training.losses, expected, rtol=AGREEMENT, atol=0)


@cache
def losses_of_one_device(work: Work, device: torch.device, count: int, steps: int) -> list[float]:
    """In float64, the mean over the chunks of the batch in each step. All ways of the same work have to have them.

    The chunks are those of ``count`` devices, because BatchNorm sees only a chunk.
    """
    model = work.model().to(device, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    chunks = list(
        zip(*(tensor.chunk(count) for tensor in batch_on(work, [device] * count, torch.float64)), strict=True)
    )
    expected = []
    for _ in range(steps):
        total = 0.0
        for chunk in chunks:
            loss = model(*chunk).mean() / len(chunks)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    return expected


def parts_of(work: Work, device: torch.device) -> Parts:
    """The parts of a model. What a share activates is measured.

    It is the peak of a forward and backward of the module alone that drops each gradient as soon as it is there.
    """
    model = work.model().to(device)
    size = bytes_of(model)
    units = [bytes_of(block) for block in blocks_of(model)]
    inputs = tuple(tensor.to(device) for tensor in work.batch(SAMPLES_PER_DEVICE))

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    wait_for([device])
    before = torch.sim.memory_allocated(device)
    reset_peaks([device])
    model(*inputs).mean().backward()
    activations = torch.sim.max_memory_allocated(device) - before
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    small = tuple(unit for unit in units if unit <= SMALL)
    return Parts(size, max(units), size - sum(units), buffers, activations, small)


def bytes_of(module: nn.Module) -> int:
    """Of all parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def wait_for(devices: Sequence[torch.device]) -> None:
    """Until the devices are idle and garbage is gone."""
    gc.collect()
    for device in devices:
        torch.sim.synchronize(device)


def reset_peaks(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.sim.reset_peak_memory_stats(device)


def row_of(model: str, way: Way, devices: int, parts: Parts, usage: Usage) -> dict[str, Any]:
    """What was used beside what was to be expected. Sizes are bytes."""
    expected = way.peak(parts, devices)
    all_reduce = 2 * (devices - 1) / devices * parts.parameters
    return {
        "model": model,
        "devices": devices,
        "way": way.name,
        "idle": usage.idle,
        "expected_idle": way.idle(parts, devices),
        "forward": usage.forward,
        "backward": usage.backward,
        "optimizer": usage.optimizer,
        "expected_peak": expected,
        "within": usage.peak <= expected,
        "received": usage.received,
        "of_all_reduce": usage.received / all_reduce if all_reduce else None,
    }
