"""What captured graphs would bring on 8 x A100: predictions by timelines, from recordings on a stand-in for CUDA.

The devices skip kernels (``cuda.skipped_work``), so that models of real size can be recorded. All replicas run at a
time, as in `timelines`.

The references have a process, and so a host, for each device. `process_timelines` makes them of one recording, that of
the module alone as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from dataparallel import DataParallel
from dataparallel.composable import replicate
from nogpu import cuda
from nogpu.timeline.presets import A100
from process_timelines import Alone, changed, one_graph
from recorded import Recorded, record, second_step
from shapes import GPT, GPT_768, RESNET50_4, RealShape
from sharded_blocks import sharded
from timelines import ALONE, REPLICATE, SHARDED, TORCH, WARM_UP, WRAPPER
from torch_pipeline import StandIns

INFERENCE, TRAINING = "inference", "training"
ALL_REDUCED = "DDP, 8 processes"
FSDP2 = "FSDP2, 8 processes"
BY_PROCESSES = (ALL_REDUCED, FSDP2)
SETTLE = 8
"""Calls with graphs before the recorded ones: two and one in each thread run as they are, and the next one captures."""

TOKENS = 128
GPT_256 = RealShape(
    "GPT of width 256, 128 tokens",
    lambda: GPT(256, 12, 4, TOKENS),
    (TOKENS,),
    torch.long,
    (TOKENS,),
    1,
    9_543_168,
)

TASKS = (
    (GPT_256, TRAINING),
    (RESNET50_4, TRAINING),
    (GPT_768, TRAINING),
    (GPT_256, INFERENCE),
    (RESNET50_4, INFERENCE),
)
CASES = (
    (TORCH, False),
    *itertools.product((WRAPPER, REPLICATE), (False, True)),
    (SHARDED, False),
)
"""The ways in one process, without graphs and with them."""


def network_of(way: str, graphs: bool, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """``module``, which is on the first of ``devices``, by a way. All replicas run at a time."""
    options: dict[str, Any] = {"graphs": True} if graphs else {}
    if way == TORCH:
        return nn.DataParallel(module, device_ids=[device.index for device in devices])
    if way == WRAPPER:
        return DataParallel(module, device_ids=devices, workers=len(devices), **options)
    if way == REPLICATE:
        return replicate(module, devices=devices, workers=len(devices), **options)
    if way == SHARDED:
        return sharded(module, devices, workers=len(devices))
    return module


class GraphedSteps:
    """Steps of one kind of work by one way. Inputs and targets come from pinned memory of the host.

    Attributes:
        module: what was made parallel.
    """

    def __init__(self, way: str, graphs: bool, shape: RealShape, work: str, devices: Sequence[torch.device]) -> None:
        self._trains, self._is_alone, self._root = work == TRAINING, way == ALONE, devices[0]
        # Without its loss, so that the caller computes it.
        self.module: nn.Module = cast("Any", shape.model(self._root)).model.train(self._trains)
        self._network = network_of(way, graphs, self.module, devices)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        batches = [shape.batch(len(devices), pinned=True) for _ in range(2)]
        for tensor in itertools.chain(*batches):
            tensor.zero_()
        self._batches = itertools.cycle(batches)

    def run(self) -> None:
        """A call without gradients; or forward, backward and a step of SGD."""
        inputs, targets = next(self._batches)
        if self._is_alone:
            inputs = inputs.to(self._root, non_blocking=True)
        if not self._trains:
            with torch.no_grad():
                self._network(inputs)
            return
        logits = self._network(inputs).flatten(0, -2)
        F.cross_entropy(logits, targets.to(self._root, non_blocking=True).flatten()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class PlainCopies(StandIns):
    """Plain copies in the place of NCCL's collectives, whose time timelines do not know."""

    @property
    def needed(self) -> bool:
        """True: also on CUDA devices."""
        return True


@contextmanager
def without_nccl() -> Iterator[None]:
    """Inside, ``torch.nn.DataParallel`` copies and adds by itself, as `timelines` records it."""
    before = torch.cuda.nccl.is_available
    torch.cuda.nccl.is_available = lambda tensors: False
    try:
        with PlainCopies("cuda").installed():
            yield
    finally:
        torch.cuda.nccl.is_available = before


def check_copies(devices: Sequence[torch.device]) -> None:
    """A small step on all devices, with kernels: the library checks once that copies between devices arrive."""
    module = nn.Linear(4, 4).to(devices[0])
    DataParallel(module, devices)(torch.ones(len(devices), 4, device=devices[0])).sum().backward()


def recorded(way: str, graphs: bool, shape: RealShape, work: str, devices: Sequence[torch.device]) -> Recorded:
    """Two steps in a row, after others."""
    with ExitStack() as stack:
        stack.enter_context(cuda.clocks(False))
        stack.enter_context(cuda.skipped_work())
        if way == TORCH:
            stack.enter_context(without_nccl())
        steps = GraphedSteps(way, graphs, shape, work, devices)
        for _ in range(SETTLE if graphs else WARM_UP):
            steps.run()
        return record(steps.run, cuda)


def recorded_alone(shape: RealShape, work: str, device: torch.device) -> Alone:
    """Steps of the module alone as it is."""
    with cuda.clocks(False), cuda.skipped_work():
        steps = GraphedSteps(ALONE, False, shape, work, [device])
        for _ in range(WARM_UP):
            steps.run()
        if work != TRAINING:
            return Alone(record(steps.run, cuda), [], [])
        return Alone.recorded(steps.module, steps.run, cuda)


def step_of(
    task: tuple[RealShape, str], way: str, graphs: bool, devices: int, found: Recorded, factor: float
) -> dict[str, Any]:
    """Milliseconds, and calls for each device. With ``factor`` Python's time is that of the machine's host."""
    shape, work = task
    processes = devices if way in BY_PROCESSES else 1  # each of them has recorded what one device does
    return {
        "model": shape.name,
        "work": work,
        "way": way,
        "graphs": graphs,
        "devices": devices,
        "machine": A100.name,
        "step": second_step(found, A100),
        "free_host": second_step(found, A100.with_free_host()),
        "python": 1e3 * factor * found.python_seconds(),
        "launches": processes * len(found.one.launches),
        "calls": processes * found.one.calls / devices,
        "graph_calls": processes * sum(launch.graph == launch.index for launch in found.one.launches) / devices,
    }


def predicted(
    shape: RealShape, work: str, devices: Sequence[torch.device], cases: Sequence[tuple[str, bool]] = CASES
) -> list[dict[str, Any]]:
    """All ways to do the work: the module alone, a process for each device, and one process."""
    check_copies(devices)
    count, task = len(devices), (shape, work)
    rows = []
    alone = recorded_alone(shape, work, devices[0])
    factor = alone.steps.cost_of_launches(A100) / alone.steps.python_seconds()
    rows += [
        step_of(task, ALONE, False, 1, alone.steps, factor),
        step_of(task, ALONE, True, 1, changed(alone.steps, one_graph), factor),
    ]
    if work == TRAINING:
        summed = alone.by_ddp(A100, count)
        rows += [
            step_of(task, ALL_REDUCED, False, count, summed, factor),
            step_of(task, ALL_REDUCED, True, count, changed(summed, one_graph), factor),
            step_of(task, FSDP2, False, count, alone.by_fsdp2(A100, count), factor),
        ]
    for way, graphs in cases:
        rows.append(step_of(task, way, graphs, count, recorded(way, graphs, shape, work, devices), factor))
    return rows
