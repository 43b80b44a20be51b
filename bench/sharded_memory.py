"""How much memory of each device a training takes: bytes from the simulator's counters.

A step is forward, backward and AdamW. Nothing is timed here, and no value is checked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from gradients import mean_square
from reporting import Cell
from shapes import GPT, VOCABULARY, Shape, WithLoss
from sharded_blocks import sharded

CAPTION = """\
Memory in MiB of the device that has most, counted by the simulator to the byte. A training step is forward, backward
and AdamW. The batch itself is not counted.

idle
    Between two steps, with gradients set to None: parameters and two averages of AdamW.
expected idle
    Three times the parameters, divided by the number of devices where they are sharded. Parts of other models have
    padding, of this one none: the width is a multiple of 64.
forward, backward, optimizer
    The largest amount during that part of a step. AdamW's foreach operators have a temporary list.
received
    What a device gets from others in a step, on the device that gets most. Inputs are not counted.
of an all-reduce
    The same divided by what an all-reduce of the gradients brings to each device: 2 (N - 1) / N of their size."""

TABLE: dict[str, Cell] = {
    "model": "{model}",
    "devices": "{devices}",
    "way": "{way}",
    "idle": "{idle:.2fMiB}",
    "expected\nidle": "{expected_idle:.2fMiB}",
    "forward": "{forward:.2fMiB}",
    "backward": "{backward:.2fMiB}",
    "optimizer": "{optimizer:.2fMiB}",
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
    """A way to train.

    Attributes:
        shards: whether parameters are spread over the devices.
        accumulates: a step has two batches, the first of them without sums of gradients.
        fits: whether it is a way to use so many devices.
    """

    name: str
    make: Make
    shards: bool = True
    accumulates: bool = False
    fits: Callable[[int], bool] = lambda devices: True


def with_options(**options: Any) -> Make:
    return lambda module, devices: sharded(module, devices, **options)


WAYS = (
    Way("one device", lambda module, devices: module, shards=False, fits=lambda devices: devices == 1),
    Way("replicate", lambda module, devices: replicate(module, devices=devices), shards=False),
    Way("fully_shard", sharded),
    Way("no prefetch", with_options(prefetch=False)),
    Way("reshard_after_forward=False", with_options(reshard_after_forward=False)),
    Way(
        "reshard_after_forward=2",
        with_options(reshard_after_forward=2),
        fits=lambda devices: devices > 2 and devices % 2 == 0,
    ),
    Way("no_sync, then a sum", sharded, accumulates=True),
)
WRAPPER = Way("DataParallel", DataParallel, shards=False)
NAMED = {way.name: way for way in (*WAYS, WRAPPER)}


class Training:
    """Steps of a way on devices. ``batch`` is on the first of them, with the samples of all."""

    def __init__(self, work: Work, way: Way, devices: Sequence[torch.device]) -> None:
        self._accumulates = way.accumulates
        self.batch = [tensor.to(devices[0]) for tensor in work.batch(SAMPLES_PER_DEVICE * len(devices))]
        self._network: Any = way.make(work.model().to(devices[0]), devices)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=RATE)

    def run(self, after: Callable[[str], None] = lambda part: None) -> None:
        """One step, which says ``after`` each of its parts. Parts of an accumulated step come twice."""
        batches = 2 if self._accumulates else 1
        for number in range(batches):
            with nullcontext() if number == batches - 1 else self._network.no_sync():
                loss = self._network(*self.batch).mean() / batches
                after("forward")
                loss.backward()
                after("backward")
            del loss
        self._optimizer.step()
        after("optimizer")
        self._optimizer.zero_grad()


def measure(work: Work, way: Way, devices: Sequence[torch.device], steps: int = STEPS) -> Usage:
    """The largest usage of some steps. Whatever else the process holds on the devices must stay as it is meanwhile."""
    wait_for(devices)
    before = [torch.sim.memory_allocated(device) for device in devices]
    training = Training(work, way, devices)
    batch = sum(tensor.nbytes for tensor in training.batch)
    before[0] += batch
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
    return Usage(idle, most["forward"], most["backward"], most["optimizer"], received)


def parameter_bytes(work: Work) -> int:
    """Of all parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in work.model().parameters())


def wait_for(devices: Sequence[torch.device]) -> None:
    """Until the devices are idle and garbage is gone."""
    gc.collect()
    for device in devices:
        torch.sim.synchronize(device)


def reset_peaks(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.sim.reset_peak_memory_stats(device)


def row_of(work: Work, way: Way, devices: int, usage: Usage) -> dict[str, Any]:
    """What was used. Sizes are bytes."""
    parameters, buffers = parameter_bytes(work), sum(buffer.nbytes for buffer in work.model().buffers())
    all_reduce = 2 * (devices - 1) / devices * parameters
    return {
        "model": work.name,
        "devices": devices,
        "way": way.name,
        "expected_idle": STATES * parameters // (devices if way.shards else 1) + buffers,
        **vars(usage),
        "of_all_reduce": usage.received / all_reduce if all_reduce else None,
    }
