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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dataparallel import DataParallel, prefetch
from dataparallel.comm.settings import using
from dataparallel.composable import fully_shard, replicate
from nogpu import SimulationUnavailable, simulate
from nogpu.timeline import HOST, Machine, Recording, Schedule, schedule
from nogpu.timeline.presets import A100, H100, PRESETS, RTX_3090, V100
from process_timelines import Alone
from published import DDP, DP, ONE, PUBLISHED, PUBLISHED_SHAPES
from recorded import Recorded, record, second_step
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
UNITS_AUTO = 'fully_shard, units="auto", reshard_after_forward=False'
WAYS = (TORCH, WRAPPER, PREFETCH, REPLICATE, SHARDED, NOT_RESHARDED)
BY_TABLES = (SHARDED, NOT_RESHARDED)
RARE = (PREFETCH, *BY_TABLES)
"""Recordings take long, so these are there for the largest number of devices only."""
ALL_REDUCED, FSDP2 = "DDP, a process each", "FSDP2, a process each"
SLOWER = ", kernels at 70 %"
"""After a way whose kernels read peers: these get 70 % of the bandwidth of copies, as kernels that nobody has tuned."""
PREDICTED_BY = {ONE: ALONE, DDP: REPLICATE, DP: TORCH}
"""What stands beside published figures."""
MACHINES = (V100, A100, H100, RTX_3090)
"""The machines of the models without published figures."""
PEER_KERNELS = (A100, H100)
"""Machines on which `fully_shard` runs on kernels that read peers, because NVLink joins all pairs."""
SHAPES = {shape.name: shape for shape in (*REAL_SHAPES, *PUBLISHED_SHAPES)}

PICTURE = (GPT_768.name, REPLICATE, DEVICES)
"""The model, way and number of devices of the picture, on 8 x A100."""

Batch = tuple[Tensor, Tensor]
Prediction = dict[str, Any]


def without_communication(planned: Schedule) -> float:
    """Milliseconds of a schedule if copies took no time."""
    return 1e3 * (planned.time - planned.exposed_communication)


def received_bytes(recording: Recording) -> int:
    """What the device that gets most gets from other devices, without the host."""
    received: Counter[int] = Counter()
    for launch in recording.launches:
        if launch.copy is not None and launch.copy[0] != launch.copy[1] and HOST not in launch.copy:
            received[launch.copy[1]] += launch.bytes_written
        for _, target, nbytes in launch.peers:
            received[target] += nbytes
    return max(received.values(), default=0)


def predict(
    model: str, way: str, devices: int, recorded: Recorded, alone: Recorded, machine: Machine, processes: int = 1
) -> Prediction:
    """What ``way`` takes on ``machine``, beside the module ``alone`` on one of its devices. Times are milliseconds.

    ``recorded`` is what each of the ``processes`` does.
    """
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
        "launches": processes * len(recorded.one.launches),
        "copies": processes * sum(launch.copy is not None for launch in recorded.one.launches),
        "received": received_bytes(recorded.one) / 1e6 if processes == 1 else None,
        "python": 1e3 * factor * recorded.python_seconds(),
        "factor": factor,  # makes the recorded time of the module alone what this host takes for its launches
    }


class Steps:
    """Steps of a model by one way on ``devices``: training, or calls without gradients and without a loss.

    Batches are in pinned memory and come in turn. All replicas run at a time.

    Attributes:
        network: the model by the way.
    """

    def __init__(
        self, way: str, shape: RealShape, devices: Sequence[torch.device], graphs: bool = False, trains: bool = True
    ) -> None:
        self._way, self._devices, self._graphs, self._trains = way, list(devices), graphs, trains
        model: Any = shape.model(self._devices[0])
        module: nn.Module = model if trains else model.model.eval()
        self.network = self._made(module)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # of the sharded parameters, where they are
        batches = [shape.batch(len(self._devices), pinned=True) for _ in range(2)]
        for tensor in itertools.chain(*batches):
            tensor.zero_()
        loader: Iterator[Batch] = itertools.cycle(batches)
        if way == PREFETCH:
            loader = iter(prefetch(loader, cast("DataParallel[nn.Module]", self.network)))
        self._batches = loader

    def _made(self, module: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"workers": len(self._devices), **({"graphs": True} if self._graphs else {})}
        if self._way == TORCH:
            return nn.DataParallel(module, device_ids=[device.index for device in self._devices])
        if self._way in (WRAPPER, PREFETCH):
            return DataParallel(module, device_ids=self._devices, **options)
        if self._way == REPLICATE:
            return replicate(module, devices=self._devices, **options)
        if self._way == NOT_RESHARDED:
            return sharded(module, self._devices, reshard_after_forward=False, **options)
        if self._way == UNITS_AUTO:
            return fully_shard(module, devices=self._devices, units="auto", reshard_after_forward=False, **options)
        return sharded(module, self._devices, **options) if self._way == SHARDED else module

    def run(self) -> None:
        inputs, targets = next(self._batches)
        if self._way == ALONE:
            inputs, targets = (tensor.to(self._devices[0], non_blocking=True) for tensor in (inputs, targets))
        if not self._trains:
            with torch.no_grad():
                self.network(inputs)
            return
        self.network(inputs, targets).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def recorded(way: str, shape: RealShape, devices: Sequence[torch.device], kernels: bool = True) -> Recorded:
    """Two steps by a way. Without ``kernels`` that read peers, tensors of sharded models travel by copies."""
    stand_ins: AbstractContextManager[None] = StandIns("sim").installed() if way == TORCH else nullcontext()
    with stand_ins, using(transport=None if kernels else "copy"):
        steps = Steps(way, shape, devices)
        for _ in range(WARM_UP):
            steps.run()
        return record(steps.run)


def recorded_alone(shape: RealShape, device: torch.device) -> Alone:
    steps = Steps(ALONE, shape, [device])
    for _ in range(WARM_UP):
        steps.run()
    return Alone.recorded(steps.network, steps.run, torch.sim)


def predictions(
    model: str, alone: Alone, by_way: Mapping[tuple[str, int], Recorded], machine: Machine
) -> list[Prediction]:
    """The module alone, each way and number of devices, and on the most devices DDP and FSDP2.

    Ways whose kernels read peers have a row with slower kernels too.
    """
    steps = alone.steps
    rows = [predict(model, ALONE, 1, steps, steps, machine)]
    slower = machine.with_(peer_kernels=0.7)
    for (way, count), found in by_way.items():
        rows.append(predict(model, way, count, found, steps, machine))
        if any(launch.peers for launch in found.one.launches):
            rows.append(predict(model, way + SLOWER, count, found, steps, slower))
    most = max((count for _, count in by_way), default=1)
    if most > 1 and alone.arrivals:
        for way, process in ((ALL_REDUCED, alone.by_ddp), (FSDP2, alone.by_fsdp2)):
            rows.append(predict(model, way, most, process(machine, most), steps, machine, processes=most))
    return rows


def asked(shape: RealShape, counts: Sequence[int], ways: Sequence[str], machine: Machine) -> list[tuple[str, int]]:
    """The ways with their numbers of devices that are predicted on a machine: all ``counts`` on 8 x A100.

    Elsewhere the largest, and those of published figures. A model that is only there for these has no others.
    """
    figures = [
        (PREDICTED_BY[figure.way], figure.devices)
        for figure in PUBLISHED
        if (figure.shape, figure.machine) == (shape, machine.name) and figure.way != ONE
    ]
    if shape not in REAL_SHAPES:
        return sorted({*figures})
    fitting = [count for count in counts if count <= machine.devices]
    shown = fitting if machine == A100 else sorted({fitting[-1], *(count for _, count in figures if count in fitting)})
    return [
        (way, count)
        for count in fitting
        for way in ways
        if count in shown and (way not in RARE or count == fitting[-1])
    ]


def machines_of(shape: RealShape) -> list[Machine]:
    """Those that a model is predicted on."""
    published = {figure.machine for figure in PUBLISHED if figure.shape == shape and shape not in REAL_SHAPES}
    return [machine for machine in PRESETS if machine.name in published] or list(MACHINES)


def main(model: str, counts: str, folder: str, *ways: str) -> None:
    try:
        devices = simulate(DEVICES, compute=False)
    except SimulationUnavailable as error:
        print(json.dumps({"why_not": str(error)}))
        return
    shape = SHAPES[model]
    alone = recorded_alone(shape, devices[0])

    @cache
    def of(way: str, count: int, kernels: bool) -> Recorded:
        return recorded(way, shape, devices[:count], kernels)

    found: list[Prediction] = []
    numbers = [int(count) for count in counts.split(",")]
    for machine in machines_of(shape):
        cases = asked(shape, numbers, ways or WAYS, machine)
        kernels = machine in PEER_KERNELS
        by_way = {(way, count): of(way, count, kernels or way not in BY_TABLES) for way, count in cases}
        found += predictions(model, alone, by_way, machine)
        if (model, machine) == (PICTURE[0], A100) and PICTURE[1:] in by_way:
            schedule(by_way[PICTURE[1:]].one, A100).plot(Path(folder) / "step.png")
    print(json.dumps({"predictions": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
