"""A command that writes down what the library does, so that two states of it can be compared by ``diff -r``.

For a change that must not change behaviour: run it before and after. From the root of the repository::

    PYTHONPATH=. python tests/goldens.py FOLDER

The folder gets a file for each form, model and kind of call, on four simulated devices. It has the launches of each
stream in their order: operator, bytes, where a copy goes. Streams have no numbers here, because these depend on which
thread came first. Another file has the public names. It is no test, and nothing calls it but a person.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.comm.streams import arrivals
from dataparallel.composable import replicate
from dataparallel.testing.steps import mean_square_loss
from nogpu import simulate
from sharded_steps import MODELS, Batch, batches_of, on_device, sharded

SLOTS = 4
WARM_UP = 3  # calls in which orders and numbers of permits are learnt
FORMS: dict[str, Callable[[Any, list[torch.device]], nn.Module]] = {
    "DataParallel": lambda model, slots: DataParallel(model, slots, workers=SLOTS),
    "replicate": lambda model, slots: replicate(model, devices=slots),
    "fully_shard": lambda model, slots: sharded(model, slots),
}
# Without units that run twice: which slot has them gathered depends on time.
CHOSEN = ("gpt", "gpt, units of several kinds", "gpt, checkpoints inside units", "resnet")


def infer(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model(*batch[0], **batch[1])


def train(model: nn.Module, batch: Batch) -> None:
    mean_square_loss(model(*batch[0], **batch[1])).backward()
    model.zero_grad()


ROOMS = ("", ".batch_types", ".comm", ".composable", ".nn", ".peers", ".sharded", ".testing", ".tracing")
CALLS = {"inference": infer, "training": train}


def launches_by_stream(recording: Any) -> Iterator[str]:
    """The launches of each stream; streams in the order of their devices and texts."""
    streams: dict[int, list[str]] = {}
    for launch in recording.launches:
        copy = "" if launch.copy is None else f" {launch.copy[0]}->{launch.copy[1]}"
        line = f"{launch.op} reads {launch.bytes_read} writes {launch.bytes_written}{copy}"
        streams.setdefault(launch.stream, []).append(line)
    named = ((recording.streams[number].device, lines) for number, lines in streams.items())
    for device, lines in sorted(named):
        yield f"a stream of device {device}, {len(lines)} launches"
        yield from (f"    {line}" for line in lines)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrivals.LATE_FROM_BYTES = 0
    slots = simulate(SLOTS)
    for form, apply in FORMS.items():
        for name in CHOSEN:
            for phase, call in CALLS.items():
                batch = next(batches_of(MODELS[name], slots))
                model = apply(on_device(MODELS[name].build, slots[0]), slots)
                model.train(phase == "training")
                for _ in range(WARM_UP):
                    call(model, batch)
                with torch.sim.timeline() as timeline:
                    call(model, batch)
                text = "\n".join(launches_by_stream(timeline.recording))
                (folder / f"{form}, {name}, {phase}.txt").write_text(text + "\n", encoding="utf-8")
    rooms = [importlib.import_module(f"dataparallel{room}") for room in ROOMS]
    names = [f"{room.__name__}: {' '.join(sorted(room.__all__))}\n" for room in rooms]
    (folder / "public names.txt").write_text("".join(names), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
