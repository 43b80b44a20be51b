"""What the timeline predicts for steps on this machine, beside what was measured: made in a process of its own.

``nogpu.predict`` runs the steps on simulated devices that compute nothing. Published figures describe the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dataparallel.testing.machine_check.checks import Check, CheckedMachine, NotHere, Seen
from dataparallel.testing.machine_check.forms import FORMS, OPTIONS
from dataparallel.testing.machine_check.trained_models import MODELS, TrainedModel, training_step

_NAMES = {"H100": "H100", "A100-SXM4-80GB": "A100_80", "A100": "A100", "V100": "V100", "3090": "RTX_3090"}
"""Parts of a GPU's name, and the preset of ``nogpu.timeline.presets``. The first part that fits counts."""


def predicted(machine: CheckedMachine) -> Seen:
    """Milliseconds of a step of each model by each form, where a published machine is like this one."""
    if machine.root.type != "cuda":
        raise NotHere("they are for machines with GPUs")
    name = torch.cuda.get_device_name(machine.root)
    preset = next((preset for part, preset in _NAMES.items() if part in name), None)
    if preset is None or len(machine.devices) < 2:
        raise NotHere(f"no published machine is like {len(machine.devices)} x {name}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NOGPU")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, preset, str(len(machine.devices))],
            capture_output=True,
            text=True,
            timeout=max(machine.seconds_left(), 1.0),
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise NotHere("the prediction had not ended when the time was over") from None
    if done.returncode:
        raise NotHere(f"the prediction has failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    shown = [f"{model}: " + ", ".join(f"{way} {ms:.1f}" for way, ms in ways.items()) for model, ways in found.items()]
    return Seen(f"predicted for {len(machine.devices)} of {preset}, ms: " + "; ".join(shown), found)


def _made(model: TrainedModel, way: str, devices: Sequence[torch.device]) -> Callable[[], object]:
    slots = [*devices[:1]] if way == "one device" else [*devices]
    module = model.model(slots[0])
    inputs, targets = (each.pin_memory() for each in model.batch(len(slots), torch.device("cpu")))
    if way == "one device":
        return training_step(module, lambda *batch: module(*(each.to(slots[0]) for each in batch)), inputs, targets)
    return training_step(module, FORMS[way](module, slots, **OPTIONS[way]), inputs, targets)


def main(preset: str, count: int) -> None:
    """Prints the predictions as JSON, in the process that `predicted` starts."""
    from nogpu import simulate
    from nogpu.predict import MACHINES, predict

    devices = simulate(count, compute=False)
    found = {
        model.name: {
            way: 1e3 * predict(partial(_made, model, way), devices, MACHINES[preset]).schedule.time
            for way in ("one device", *FORMS)
        }
        for model in MODELS
    }
    print(json.dumps(found))


CHECKS = (Check("speed", "predictions", predicted, hangs_after=600),)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
