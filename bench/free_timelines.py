"""What 8 devices would take with a Python with a lock and without one: a script that prints predictions as JSON.

``python free_timelines.py LAYERS MODELS`` simulates devices that skip kernels, and records calls of launch-bound models
of LAYERS layers (``30,120,300``) and training steps of MODELS, names of `timelines.SHAPES` separated by semicolons. It
schedules each recording on one machine with two hosts: in one of them Python has a lock, in the other it has none. All
replicas run at a time, as in `timelines`.

Both hosts take the same time for a launch, so that only the lock makes a difference. A host that takes what Python took
where it was recorded is there too: its time includes what the library does between launches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch
from torch import Tensor, nn

import timelines
from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from free_timelines_report import CORES, INFERENCE, TRAINING, PredictedRow
from launch_bound import OPERATORS_PER_LAYER, batch, layers_in_a_row
from nogpu import SimulationUnavailable, simulate
from nogpu.timeline import Host, Machine
from nogpu.timeline.presets import A100
from stages import mean_square
from timelines import ALONE, DEVICES, REPLICATE, SHAPES, SHARDED, TORCH, WARM_UP, WRAPPER, Recorded, record, second_step
from torch_pipeline import StandIns

FROZEN = "DataParallel, frozen"
WAYS = {INFERENCE: (TORCH, WRAPPER, FROZEN, REPLICATE, SHARDED), TRAINING: (TORCH, WRAPPER, REPLICATE, SHARDED)}


def network_of(way: str, module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """``module``, which is on the first of ``devices``, by a way."""
    if way == TORCH:
        return nn.DataParallel(module, device_ids=[device.index for device in devices])
    if way in (WRAPPER, FROZEN):
        return DataParallel(module, device_ids=devices, workers=len(devices))
    if way == REPLICATE:
        return replicate(module, devices=devices, workers=len(devices))
    if way == SHARDED:
        fully_shard(module, devices=devices, workers=len(devices))
    return module


def call_of(network: nn.Module, inputs: Tensor, work: str) -> Callable[[], None]:
    """A call without gradients, or forward, loss and backward."""
    if work == INFERENCE:

        def infer() -> None:
            with torch.no_grad():
                network(inputs)

        return infer

    def train() -> None:
        mean_square(network(inputs)).backward()
        network.zero_grad()

    return train


def recorded(way: str, work: str, layers: int, devices: Sequence[torch.device]) -> Recorded:
    """Two calls in a row, after others."""
    module = layers_in_a_row(layers).to(devices[0]).train(work == TRAINING)
    network = network_of(way, module, devices)
    call = call_of(network, batch(len(devices)).to(devices[0]), work)
    stand_ins: AbstractContextManager[None] = StandIns("sim").installed() if way == TORCH else nullcontext()
    frozen = network.options.frozen() if way == FROZEN else nullcontext()
    with stand_ins, frozen:
        for _ in range(WARM_UP):
            call()
        return record(call)


def row(
    model: str, work: str, way: str, devices: int, found: Recorded, alone: Recorded, machine: Machine
) -> PredictedRow:
    """One more call with each host. ``alone`` is the module alone with the samples of one device."""

    def with_host(recorded: Recorded, host: Host) -> float:
        return second_step(recorded, machine.with_(host=host))

    host = machine.host
    measured = Host(measured=alone.cost_of_launches(machine) / alone.python_seconds())
    return PredictedRow(
        model=model,
        work=work,
        way=way,
        devices=devices,
        machine=machine.name,
        python_launches=sum(not launch.in_backward for launch in found.one.launches),
        launches=len(found.one.launches),
        lock=with_host(found, host),
        no_lock=with_host(found, host.without_lock(CORES)),
        measured_lock=with_host(found, measured),
        measured_no_lock=with_host(found, measured.without_lock(CORES)),
        free_host=second_step(found, machine.with_free_host()),
        alone=with_host(alone, host),
    )


def launch_bound_rows(layers: int, devices: Sequence[torch.device]) -> list[PredictedRow]:
    rows = []
    model = f"{OPERATORS_PER_LAYER * layers} operators"
    for work, ways in WAYS.items():
        alone = recorded(ALONE, work, layers, devices[:1])
        rows.append(row(model, work, ALONE, 1, alone, alone, A100))
        for way in ways:
            found = recorded(way, work, layers, devices)
            rows.append(row(model, work, way, len(devices), found, alone, A100))
    return rows


def rows_of_steps(name: str, devices: Sequence[torch.device]) -> list[PredictedRow]:
    """Training steps of a model of real size, with the optimizer."""
    shape = SHAPES[name]
    alone = timelines.recorded(ALONE, shape, devices[:1])
    rows = [row(name, TRAINING, ALONE, 1, alone, alone, A100)]
    for way in (WRAPPER, REPLICATE, SHARDED):
        found = timelines.recorded(way, shape, devices)
        rows.append(row(name, TRAINING, way, len(devices), found, alone, A100))
    return rows


def main(layers: str, models: str = "") -> None:
    try:
        devices = simulate(DEVICES, compute=False)
    except SimulationUnavailable as error:
        print(json.dumps({"why_not": str(error)}))
        return
    rows = [row for number in layers.split(",") for row in launch_bound_rows(int(number), devices)]
    rows += [row for name in filter(None, models.split(";")) for row in rows_of_steps(name, devices)]
    print(json.dumps({"predictions": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
