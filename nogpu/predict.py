"""``python -m nogpu.predict package:function`` predicts how long a training step would take on a machine with GPUs.

The step runs on simulated devices that skip kernels, so the model may be larger than this machine. Its launches are
recorded, and a timeline says when each would run. Nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nogpu.compiling import SimulationUnavailable
from nogpu.simulated import device_module as sim
from nogpu.simulated import simulate
from nogpu.tables import aligned
from nogpu.timeline import HOST, Machine, Schedule, presets

Step = Callable[[], Any]
"""One training step: forward, backward, and what else the program does in it."""

Make = Callable[[Sequence[torch.device]], Step]
"""The user's function: it puts a model and a batch on the devices that it gets, and returns the step."""

PROGRAM = "python -m nogpu.predict"
WARM_UP = 2  # steps; later ones launch the same

MACHINES: Mapping[str, Machine] = {
    name: preset for name in presets.__all__ if isinstance(preset := getattr(presets, name), Machine)
}


@dataclass(frozen=True)
class Prediction:
    """A step on a machine. Lists have the bytes of each device.

    Attributes:
        schedule: when each launch would run, from idle devices.
        from_host, received, sent: copied in the step; the last two from and to other devices.
        between: of the tensors that stay from step to step.
        at_most: of all tensors, in the step.
    """

    schedule: Schedule
    from_host: list[int]
    received: list[int]
    sent: list[int]
    between: list[int]
    at_most: list[int]


def predict(make: Make, devices: Sequence[torch.device], machine: Machine) -> Prediction:
    """Runs three steps of what ``make`` returns, and records the last.

    Args:
        make: called once, with ``devices``.
        devices: simulated ones, as many as the machine has or fewer.
        machine: one of ``nogpu.timeline.presets``, or your own.

    Raises:
        TypeError: ``make`` returns something that cannot be called.
    """
    gc.collect()
    before = [sim.memory_allocated(device) for device in devices]
    step = make(devices)
    if not callable(step):
        raise TypeError(f"the function returns a step, which is called without arguments; got {type(step).__name__}")
    for _ in range(WARM_UP):
        step()
    for device in devices:
        sim.synchronize(device)
        sim.reset_peak_memory_stats(device)
    between = [sim.memory_allocated(device) for device in devices]
    with sim.timeline() as timeline, sim.counted() as counts:
        step()
    return Prediction(
        timeline.schedule(machine),
        [counts.copied[HOST, device.index] for device in devices],
        [counts.received(device) for device in devices],
        [counts.sent(device) for device in devices],
        [now - then for now, then in zip(between, before, strict=True)],
        [sim.max_memory_allocated(device) - then for device, then in zip(devices, before, strict=True)],
    )


def table(predictions: Mapping[str, Prediction]) -> str:
    """A row for each step: times beside the first row, waits for copies, and the bytes of the device that has most."""
    head = (
        "",
        "step, ms",
        "times as fast",
        "waits, %",
        "from the host",
        "from devices",
        "between",
        "at most",
    )
    first = next(iter(predictions.values()), None)
    rows = [
        (
            name,
            f"{1e3 * one.schedule.time:.1f}",
            f"{first.schedule.time / one.schedule.time:.2f}" if first is not None and one.schedule.time else "",
            f"{100 * one.schedule.exposed_communication / one.schedule.time:.0f}" if one.schedule.time else "",
            *(_bytes(max(sizes)) for sizes in (one.from_host, one.received, one.between, one.at_most)),
        )
        for name, one in predictions.items()
    ]
    return aligned([head, *rows])


_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def _bytes(count: int) -> str:
    unit, size = next(((name, size) for name, size in _UNITS.items() if count >= size), ("B", 1))
    return f"{count} B" if unit == "B" else f"{count / size:.1f} {unit}"


def parser() -> argparse.ArgumentParser:
    """The arguments, as ``--help`` shows them."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Predicts training steps on a machine with GPUs, without one. Each function gets a list of "
        "devices, puts a model and a batch there, and returns a step: a function without arguments.",
        allow_abbrev=False,
    )
    parser.add_argument("functions", nargs="+", metavar="package:function", help="a row of the table for each")
    parser.add_argument("--machine", choices=[*MACHINES], default="A100", help="(default: A100)")
    parser.add_argument("--details", action="store_true", help="print the timeline of each step too")
    return parser


def main() -> None:
    """Prints the table."""
    sys.path.insert(0, os.getcwd())
    options = parser().parse_args()
    try:
        makes = {name: _found(name) for name in options.functions}
        machine = MACHINES[options.machine]
        devices = simulate(machine.devices, compute=False)
    except (SimulationUnavailable, ValueError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    predictions = {name: predict(make, devices, machine) for name, make in makes.items()}
    print(f"A prediction for {machine.name}: nothing is measured.\n\n{table(predictions)}")
    for name, one in predictions.items():
        if options.details:
            print(f"\n{name}\n\n{one.schedule.summary()}")


def _found(name: str) -> Make:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name}: there is no module {module!r} in {os.getcwd()} or on PYTHONPATH") from None
    if not callable(found):
        raise ValueError(f"{name}: pass package:function; {module} has no function {function!r}")
    make: Make = found
    return make


if __name__ == "__main__":
    main()
