"""Predicted steps of models of real size: a script for one model, and how a prediction is made of recordings.

``python timelines.py MODEL COUNTS FOLDER [WAY ...]`` simulates devices that skip kernels, and records training steps of
the model (a name of `SHAPES`) on each of COUNTS devices (``2,4,8``) by each WAY (default: `WAYS`); for a model that is
only there for its published figures, what these need. It schedules them on machines of ``presets``, and prints what it
predicts as JSON. A picture of one step goes to FOLDER. A step is forward, backward and the step of SGD. Its inputs and
targets come from pinned memory of the host. Nothing here measures how long anything takes, except for Python between
two launches.

What is recorded is what the library does after its beginning. The first steps are left out, because the first backward
learns the order of buckets. All replicas run at a time, because otherwise the library would measure how many should,
and kernels that are skipped take no time.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dataparallel import DataParallel, prefetch
from dataparallel.composable import replicate
from nogpu import SimulationUnavailable, simulate
from nogpu.timeline import HOST, Machine, Recording, Schedule, schedule
from nogpu.timeline.presets import A100, H100, PRESETS, RTX_3090, V100
from published import DDP, DP, ONE, PUBLISHED, PUBLISHED_SHAPES
from shapes import GPT_768, REAL_SHAPES, RealShape
from sharded_blocks import sharded
from torch_pipeline import StandIns

DEVICES = 8
WARM_UP = 2  # steps; later ones launch the same
ALONE = "module alone"
TORCH = "torch.nn.DataParallel"
WRAPPER = "DataParallel"
PREFETCH = "DataParallel, prefetch"
REPLICATE = "composable.replicate"
SHARDED = "composable.fully_shard"
NOT_RESHARDED = "fully_shard, reshard_after_forward=False"
WAYS = (TORCH, WRAPPER, PREFETCH, REPLICATE, SHARDED, NOT_RESHARDED)
PREDICTED_BY = {ONE: ALONE, DDP: REPLICATE, DP: TORCH}
"""What stands beside published figures."""
MACHINES = (V100, A100, H100, RTX_3090)
"""The machines of the models without published figures."""
SHAPES = {shape.name: shape for shape in (*REAL_SHAPES, *PUBLISHED_SHAPES)}

PICTURE = (GPT_768.name, REPLICATE, DEVICES)
"""The model, way and number of devices of the picture, on 8 x A100."""

Batch = tuple[Tensor, Tensor]
Prediction = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """What one way does on some devices: a step that begins with idle devices, and two such steps in a row."""

    one: Recording
    two: Recording

    def python_seconds(self) -> float:
        """CPU seconds of the Python threads between the launches of a step, on the machine that recorded."""
        return sum(launch.host_seconds for launch in self.one.launches if not launch.in_backward)

    def cost_of_launches(self, machine: Machine) -> float:
        """Seconds that the machine's host takes for what Python threads launch in a step."""
        return sum(sum(machine.host.cost(launch)) for launch in self.one.launches if not launch.in_backward)


def second_step(recorded: Recorded, machine: Machine) -> float:
    """Milliseconds that a second step adds."""
    return 1e3 * (schedule(recorded.two, machine).time - schedule(recorded.one, machine).time)


def without_communication(planned: Schedule) -> float:
    """Milliseconds of a schedule if copies took no time."""
    return 1e3 * (planned.time - planned.exposed_communication)


def received_bytes(recording: Recording) -> int:
    """What the device that gets most gets from other devices, without the host."""
    received: Counter[int] = Counter()
    for launch in recording.launches:
        if launch.copy is not None:
            origin, target = launch.copy
            if origin != target and HOST not in launch.copy:
                received[target] += launch.bytes_written
    return max(received.values(), default=0)


def predict(model: str, way: str, devices: int, recorded: Recorded, alone: Recorded, machine: Machine) -> Prediction:
    """What ``way`` takes on ``machine``, beside the module ``alone`` on one of its devices. Times are milliseconds."""
    free = machine.with_free_host()
    one, two = schedule(recorded.one, machine), schedule(recorded.two, machine)
    factor = alone.cost_of_launches(machine) / alone.python_seconds()
    return {
        "model": model,
        "machine": machine.name,
        "way": way,
        "devices": devices,
        "step": 1e3 * (two.time - one.time),  # one more step, where the host may run ahead
        "from_idle": 1e3 * one.time,
        "free_host": second_step(recorded, free),
        "bound": without_communication(schedule(alone.one, free)),
        "alone": second_step(alone, machine),
        "exposed": 1e3 * (two.exposed_communication - one.exposed_communication),
        "launches": len(recorded.one.launches),
        "copies": sum(launch.copy is not None for launch in recorded.one.launches),
        "received": received_bytes(recorded.one) / 1e6,
        "python": 1e3 * factor * recorded.python_seconds(),
        "factor": factor,  # makes the recorded time of the module alone what this host takes for its launches
    }


class Steps:
    """Training steps of a model by one way on ``devices``. ``batches`` are in pinned memory and come in turn."""

    def __init__(self, way: str, shape: RealShape, devices: Sequence[torch.device]) -> None:
        self._way, self._devices = way, list(devices)
        module = shape.model(self._devices[0])
        self._network = self._made(module)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # of the sharded parameters, where they are
        batches = [shape.batch(len(self._devices), pinned=True) for _ in range(2)]
        loader: Iterator[Batch] = itertools.cycle(batches)
        if way == PREFETCH:
            loader = iter(prefetch(loader, cast("DataParallel[nn.Module]", self._network)))
        self._batches = loader

    def _made(self, module: nn.Module) -> nn.Module:
        """``module`` by the way. All replicas run at a time."""
        if self._way == TORCH:
            return nn.DataParallel(module, device_ids=[device.index for device in self._devices])
        if self._way in (WRAPPER, PREFETCH):
            return DataParallel(module, device_ids=self._devices, workers=len(self._devices))
        if self._way == REPLICATE:
            return replicate(module, devices=self._devices, workers=len(self._devices))
        if self._way in (SHARDED, NOT_RESHARDED):
            reshard = None if self._way == SHARDED else False
            return sharded(module, self._devices, reshard_after_forward=reshard, workers=len(self._devices))
        return module

    def run(self) -> None:
        inputs, targets = next(self._batches)
        if self._way == ALONE:
            inputs, targets = (tensor.to(self._devices[0], non_blocking=True) for tensor in (inputs, targets))
        self._network(inputs, targets).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def record(run: Callable[[], None], simulator: Any = None) -> Recorded:
    """What two calls of ``run`` launch, from idle devices. The first of them is the beginning of the recording.

    ``simulator`` has the timeline and the counts; ``torch.sim`` by default.
    """
    simulator = simulator or torch.sim
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    with simulator.timeline() as timeline:
        with simulator.counted() as counts:
            run()
        run()
    both = timeline.recording
    return Recorded(replace(both, launches=both.launches[: sum(counts.launches)]), both)


def recorded(way: str, shape: RealShape, devices: Sequence[torch.device]) -> Recorded:
    stand_ins: AbstractContextManager[None] = StandIns("sim").installed() if way == TORCH else nullcontext()
    with stand_ins:
        steps = Steps(way, shape, devices)
        for _ in range(WARM_UP):
            steps.run()
        return record(steps.run)


def predictions(
    model: str, alone: Recorded, by_way: Mapping[tuple[str, int], Recorded], machines: Sequence[Machine]
) -> list[Prediction]:
    """For each machine and each way and number of devices that it has; first the module alone."""
    return [
        predict(model, way, count, found, alone, machine)
        for machine in machines
        for (way, count), found in {(ALONE, 1): alone, **by_way}.items()
        if count <= machine.devices
    ]


def asked(shape: RealShape, counts: Sequence[int], ways: Sequence[str]) -> list[tuple[str, int]]:
    """The ways with their numbers of devices that are recorded for a model.

    Recordings take long, so prefetching and sharding are there for the largest number of devices only.
    """
    if shape in REAL_SHAPES:
        rare = (PREFETCH, SHARDED, NOT_RESHARDED)
        return [(way, count) for count in counts for way in ways if way not in rare or count == max(counts)]
    figures = [figure for figure in PUBLISHED if figure.shape == shape and figure.way != ONE]
    return sorted({(PREDICTED_BY[figure.way], figure.devices) for figure in figures})


def machines_of(shape: RealShape) -> list[Machine]:
    """Those that a model is predicted on."""
    published = {figure.machine for figure in PUBLISHED if figure.shape == shape and shape not in REAL_SHAPES}
    return [machine for machine in PRESETS if machine.name in published] or list(MACHINES)


def is_shown(shape: RealShape, machine: Machine, count: int, counts: Sequence[int]) -> bool:
    """Whether so many devices of a machine are predicted: all ``counts`` on 8 x A100, elsewhere the largest.

    Counts with published figures always are.
    """
    if count > machine.devices:
        return False
    if any((figure.shape, figure.machine, figure.devices) == (shape, machine.name, count) for figure in PUBLISHED):
        return True
    return machine == A100 or count == max(other for other in counts if other <= machine.devices)


def main(model: str, counts: str, folder: str, *ways: str) -> None:
    try:
        devices = simulate(DEVICES, compute=False)
    except SimulationUnavailable as error:
        print(json.dumps({"why_not": str(error)}))
        return
    shape = SHAPES[model]
    alone = recorded(ALONE, shape, devices[:1])
    found: list[Prediction] = []
    numbers = [int(count) for count in counts.split(",")]
    machines = machines_of(shape)
    cases = [
        (way, count)
        for way, count in asked(shape, numbers, ways or WAYS)
        if any(is_shown(shape, machine, count, numbers) for machine in machines)
    ]
    by_way = {(way, count): recorded(way, shape, devices[:count]) for way, count in cases}
    for machine in machines:
        shown = {case: by_way[case] for case in cases if is_shown(shape, machine, case[1], numbers)}
        found += predictions(model, alone, shown, [machine])
    if model == PICTURE[0] and PICTURE[1:] in by_way:
        schedule(by_way[PICTURE[1:]].one, A100).plot(Path(folder) / "step.png")
    print(json.dumps({"predictions": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
