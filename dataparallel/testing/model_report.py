"""`plan`: what a training step of a user's model would do by each form, as sections of a report.

It is behind ``python -m dataparallel --model``. ``planned`` runs the steps.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dataparallel.batches.scatter import scatter
from dataparallel.testing.compiling import SimulationUnavailable
from dataparallel.testing.planned import ALONE, WAYS, Make, Planned, made, pinned, planned
from dataparallel.testing.simulated import simulate
from dataparallel.testing.simulated.timeline import HOST, Machine, Schedule, presets
from dataparallel.tracing.report import bucket_tables
from dataparallel.tracing.report_parts import Facts, Links, Part, Section, Table, Timeline


def plan(make: Make, called: str, machine: str = "A100") -> list[Section]:
    """Plans steps of the model that ``make`` makes, whose name is ``called``.

    ``machine``: the name of one of ``timeline.presets``. ``make`` is called once here, and once for each form. If
    devices cannot be simulated, or a form refuses the model, the sections say why.

    Raises:
        argparse.ArgumentTypeError: there is no such machine; ``make`` returns something else than a module and its
            arguments.
    """
    known = {name: preset for name in presets.__all__ if isinstance(preset := getattr(presets, name), Machine)}
    if machine not in known:
        raise argparse.ArgumentTypeError(
            f"--machine {machine}: there is no such machine; pass one of {', '.join(known)}"
        )
    title, about = f"the model {called}", _about(*made(make))
    try:
        devices = simulate(known[machine].devices, compute=False)
    except SimulationUnavailable as error:
        why = f"No step is predicted, because there are no simulated devices here: {error}"
        return [Section(title, [Facts(about), why])]
    return sections(make, title, about, devices, known[machine])


def sections(
    make: Make, title: str, about: Sequence[tuple[str, str]], devices: Sequence[torch.device], machine: Machine
) -> list[Section]:
    """The sections about the model, on simulated devices, as many as the machine has."""
    found: dict[str, Planned | str] = {}
    with _ours_recorded() as warned:
        facts = Facts([*about, _chunks(made(make)[1], devices)])
        for way in WAYS:
            try:
                found[way] = planned(make, way, devices, machine)
            except Exception as error:  # the report says it
                found[way] = f"{type(error).__name__}: {error}"
    done = {way: step for way, step in found.items() if isinstance(step, Planned)}
    refused = [f"{way} cannot be planned. {why}" for way, why in found.items() if isinstance(why, str)]
    return [
        Section(title, [*_figures(done), facts, _summary(done), *refused, _NOTE]),
        Section(f"a step on {machine.name}", [_picture(way, step.schedule) for way, step in done.items()]),
        Section("bytes of each device in a step", [_of_each(way, step) for way, step in done.items()]),
        Section(f"links of {machine.name}", [_links(machine), *bucket_tables(devices)]),
        Section("warnings", warned or ["None of this library."]),
    ]


_NOTE = (
    "A prediction: nothing is measured. A step is forward, backward and SGD; an optimizer such as AdamW holds two more "
    "copies of the parameters. The loss is the output's loss or, if it has none, the mean of its tensors."
)


def _about(module: nn.Module, arguments: Any) -> list[tuple[str, str]]:
    parameters, trained = [*module.parameters()], [one for one in module.parameters() if one.requires_grad]
    numbers, sizes = (
        [sum(f(one) for one in tensors) for tensors in (parameters, trained)] for f in (Tensor.numel, _size)
    )
    shapes = [f"{tuple(one.shape)} {str(one.dtype)[6:]}" for one in tree_leaves(arguments) if isinstance(one, Tensor)]
    return [
        ("model", type(module).__name__),
        ("parameters", f"{numbers[0]:,} ({_bytes(sizes[0])}), trained {numbers[1]:,} ({_bytes(sizes[1])})"),
        ("buffers", _bytes(sum(map(_size, module.buffers())))),
        ("batch", ", ".join(shapes) or "no tensor"),
    ]


def _chunks(arguments: Any, devices: Sequence[torch.device]) -> tuple[str, str]:
    tensors = [tree_leaves(chunk) for chunk in scatter(pinned(arguments), devices)]
    sizes = [next((len(one) for one in chunk if isinstance(one, Tensor) and one.dim()), 0) for chunk in tensors]
    return "chunks", f"{' '.join(map(str, sizes))} samples on {len(sizes)} of {len(devices)} devices"


@contextmanager
def _ours_recorded() -> Iterator[list[Part]]:
    """Collects the library's warnings, each once; those of others are shown as ever."""
    found: list[Part] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for one in caught:
        if one.category.__module__.partition(".")[0] != "dataparallel":
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)
        elif (text := f"{one.category.__name__}: {one.message}") not in found:
            found.append(text)


def _figures(done: Mapping[str, Planned]) -> list[Facts]:
    """The fastest form, and what it gains; nothing if there is nothing to compare."""
    times = {way: step.schedule.time for way, step in done.items()}
    forms = [way for way in times if way != ALONE]
    if len(forms) in (0, len(times)):
        return []
    best = min(forms, key=lambda way: times[way])
    rows = [
        (f"a step by {best}", f"{1e3 * times[best]:.1f} ms"),
        (f"times as fast as {ALONE}", f"{times[ALONE] / times[best]:.2f}"),
        ("of it waiting for copies", f"{_exposed(done[best]):.0f} %"),
        ("at most on a device", _bytes(max(done[best].at_most))),
    ]
    return [Facts(rows, "figures")]


def _exposed(step: Planned) -> float:
    return 100 * step.schedule.exposed_communication / step.schedule.time


def _summary(done: Mapping[str, Planned]) -> Table:
    head = (
        *("", "step, ms", "times one device", "waits for copies, %"),
        *("from the host", "from devices", "between steps", "at most"),
    )
    rows = [
        (
            way,
            f"{1e3 * step.schedule.time:.1f}",
            f"{done[ALONE].schedule.time / step.schedule.time:.2f}" if ALONE in done else "",
            f"{_exposed(step):.0f}",
            *(_bytes(max(sizes)) for sizes in (step.from_host, step.received, step.between, step.at_most)),
        )
        for way, step in done.items()
    ]
    return Table("A training step by each form; bytes are those of the device that has most", head, rows)


def _of_each(way: str, step: Planned) -> Table:
    head = ("device", "from the host", "from devices", "to devices", "between steps", "at most")
    columns = step.from_host, step.received, step.sent, step.between, step.at_most
    rows = [(str(number), *map(_bytes, sizes)) for number, sizes in enumerate(zip(*columns, strict=True)) if any(sizes)]
    return Table(way, head, rows, is_detail=True)


def _picture(way: str, result: Schedule) -> Timeline:
    """A row for the host and for each device, which has a lane for kernels and one for its copies."""
    launches, solution = result.recording.launches, result.solution
    first = min((launch.index for launch in launches if launch.in_backward), default=len(launches))
    host = [(solution.issue[launch.index], solution.reached[launch.index]) for launch in launches]
    rows: list[tuple[str, Sequence[Mapping[str, Any]]]] = [("host", [{"the host issues launches": host}])]
    for device in range(result.machine.devices):
        kernels: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": [], "optimizer": []}
        copies: list[tuple[float, float]] = []
        for launch in launches:
            span = result.start[launch.index], result.end[launch.index]
            if launch.copy is not None:
                if device in launch.copy:
                    copies.append(span)
            elif result.recording.streams[launch.stream].device == device:
                phase = "backward" if launch.in_backward else "forward" if launch.index < first else "optimizer"
                kernels[phase].append(span)
        if copies or any(kernels.values()):
            rows.append((f"device {device}", [kernels, {"sends or receives": copies}]))
    return Timeline(way, result.time, rows)


def _links(machine: Machine) -> Links:
    """Pairs are joined if a copy takes no link that leads to the host."""
    ways, paths = {}, machine.wiring.paths
    for (one, other), path in paths.items():
        if HOST not in (one, other) and one < other and not {*path.links} & {*paths[one, HOST].links}:
            ways[one, other] = f"{path.bandwidth / 1e9:.0f} GB/s in each direction"
    return Links([(f"device {number}", ()) for number in range(machine.devices)], ways)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _bytes(count: int) -> str:
    power = min(3, (count.bit_length() - 1) // 10) if count else 0
    return f"{count / 2 ** (10 * power):,.1f} {' KMG'[power]}iB" if power else f"{count} B" if count else "0"
