"""`plan`: what a training step of a user's model would do by each form, as sections of a report.

It is behind ``python -m dataparallel --model``. Steps run on simulated devices that skip kernels, and a timeline
predicts how long they would take on a published machine.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dataparallel import DataParallel, composable
from dataparallel.batches.scatter import scatter
from dataparallel.testing.compiling import SimulationUnavailable
from dataparallel.testing.simulated import simulate
from dataparallel.testing.simulated.timeline import HOST, Machine, Schedule, presets
from dataparallel.tracing.report import bucket_tables
from dataparallel.tracing.report_parts import Facts, Links, Part, Section, Table, Timeline

Make = Callable[[], tuple[nn.Module, Any]]
"""The user's function: it returns a module, and a tuple of positional or a dict of keyword arguments of one call.

Both are on the CPU, or on the meta device if they are too large for the host. Parameters and arguments need no values.
"""

ALONE = "one device"
WARM_UP = 2  # steps; later ones launch the same


@dataclass(frozen=True)
class Planned:
    """A step by one way. Lists have the bytes of each device.

    Attributes:
        schedule: when each launch would run, from idle devices.
        from_host, received, sent: copied in the step; the last two from and to other devices.
        between: of the model's tensors that stay from step to step.
        at_most: of all tensors, in the step.
    """

    schedule: Schedule
    from_host: list[int]
    received: list[int]
    sent: list[int]
    between: list[int]
    at_most: list[int]


def plan(make: Make, called: str, machine: str = "A100") -> list[Section]:
    """Plans steps of the model that ``make`` makes, whose name is ``called``.

    ``machine``: the name of one of ``timeline.presets``. ``make`` is called once here, and once for each form. If
    devices cannot be simulated, or a form refuses the model, the sections say why.

    Raises:
        ValueError: there is no such machine.
        TypeError: ``make`` returns something else than a module and its arguments.
    """
    known = {name: preset for name in presets.__all__ if isinstance(preset := getattr(presets, name), Machine)}
    if machine not in known:
        raise ValueError(f"there is no machine {machine!r}: pass one of {', '.join(known)}")
    about = _about(*made(make))
    try:
        devices = simulate(known[machine].devices, compute=False)
    except SimulationUnavailable as error:
        return [
            Section(
                f"the model {called}",
                [about, f"No step is predicted, because there are no simulated devices here: {error}"],
            )
        ]
    torch.sim.links_are_all_to_all = known[machine] in presets.LINKED_ALL_TO_ALL
    return sections(make, called, devices, known[machine], about)


def sections(make: Make, called: str, devices: Sequence[torch.device], machine: Machine, about: Facts) -> list[Section]:
    """The sections about the model, on simulated devices, as many as the machine has."""
    found: dict[str, Planned | str] = {}
    with _ours_recorded() as warned:
        chunks = _chunks(made(make)[1], devices)
        for way in WAYS:
            try:
                found[way] = planned(make, way, devices, machine)
            except Exception as error:  # the report says it
                found[way] = f"{type(error).__name__}: {error}"
    done = {way: step for way, step in found.items() if isinstance(step, Planned)}
    refused = [f"{way} cannot be planned. {why}" for way, why in found.items() if isinstance(why, str)]
    return [
        Section(
            f"the model {called}", [_figures(done), Facts([*about.rows, *chunks]), _summary(done), *refused, _NOTE]
        ),
        Section(f"a step on {machine.name}", [_picture(way, step.schedule) for way, step in done.items()]),
        Section("bytes of each device in a step", [_of_each(way, step) for way, step in done.items()]),
        Section(f"links of {machine.name}", [_links(machine), *bucket_tables(devices)]),
        Section("warnings", [*warned] or ["None of this library."]),
    ]


_NOTE = (
    "A prediction: nothing is measured. A step is forward, backward and SGD; an optimizer such as AdamW holds two more "
    "copies of the parameters. The loss is the output's loss or, if it has none, the mean of its tensors."
)


def made(make: Make) -> tuple[nn.Module, Any]:
    """What the user's function returns, checked."""
    found = make()
    if isinstance(found, tuple) and len(found) == 2:
        module, arguments = found
        if isinstance(module, nn.Module) and isinstance(arguments, (tuple, dict)):
            return module, arguments
    what = f"({', '.join(type(one).__name__ for one in found)})" if isinstance(found, tuple) else type(found).__name__
    raise TypeError(
        "the function of --model returns (module, arguments): a torch.nn.Module, and a tuple of positional arguments "
        f"or a dict of keyword arguments of one call; got {what}"
    )


def _about(module: nn.Module, arguments: Any) -> Facts:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    shapes = [f"{tuple(one.shape)} {str(one.dtype)[6:]}" for one in tree_flatten(arguments)[0] if _is_tensor(one)]
    return Facts(
        [
            ("model", type(module).__name__),
            (
                "parameters",
                f"{sum(one.numel() for one in parameters):,}, {trained:,} of them trained; {_bytes(_size(parameters))}",
            ),
            ("buffers", _bytes(_size(buffers))),
            ("batch", ", ".join(shapes) or "no tensor"),
        ]
    )


def _chunks(arguments: Any, devices: Sequence[torch.device]) -> list[tuple[str, str]]:
    tensors = [tree_flatten(chunk)[0] for chunk in scatter(_pinned(arguments), devices)]
    sizes = [next((one.shape[0] for one in chunk if _is_tensor(one) and one.dim()), 0) for chunk in tensors]
    return [("chunks", f"{' '.join(map(str, sizes))} samples on {len(sizes)} of {len(devices)} devices")]


def planned(make: Make, way: str, devices: Sequence[torch.device], machine: Machine) -> Planned:
    """Runs steps of a new model by one of `WAYS`, and records the last."""
    gc.collect()
    before = [torch.sim.memory_allocated(device) for device in devices]
    module, arguments = made(make)
    module = _on_device(module, devices[0])
    network, arguments = WAYS[way](module, devices), _pinned(arguments)
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1)

    def step() -> None:
        given = arguments
        if way == ALONE:
            given = tree_map(lambda one: one.to(devices[0], non_blocking=True) if _is_tensor(one) else one, given)
        _loss(network(**given) if isinstance(given, dict) else network(*given)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    for device in devices:
        torch.sim.synchronize(device)
        torch.sim.reset_peak_memory_stats(device)
    between = [torch.sim.memory_allocated(device) for device in devices]
    with torch.sim.timeline() as timeline, torch.sim.counted() as counts:
        step()
    return Planned(
        timeline.schedule(machine),
        [counts.copied[HOST, device.index] for device in devices],
        [counts.received(device) for device in devices],
        [counts.sent(device) for device in devices],
        [now - then for now, then in zip(between, before, strict=True)],
        [torch.sim.max_memory_allocated(device) - then for device, then in zip(devices, before, strict=True)],
    )


def _on_device(module: nn.Module, device: torch.device) -> nn.Module:
    if not any(one.is_meta for one in module.parameters()):
        return module.to(device)
    # Not to_empty, which makes two of a parameter that two modules share.
    empty = {id(one): torch.empty_like(one, device=device) for one in (*module.parameters(), *module.buffers())}
    empty |= {id(one): nn.Parameter(empty[id(one)], one.requires_grad) for one in module.parameters()}
    return copy.deepcopy(module, empty)


def _wrapped(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    # All replicas run at a time. Otherwise the library would time kernels, which are skipped.
    return DataParallel(module, devices, workers=len(devices))


def _replicated(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    return composable.replicate(module, devices=devices, workers=len(devices))


def _sharded(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    for unit in units_of(module):
        composable.fully_shard(unit, devices=devices)
    return composable.fully_shard(module, devices=devices, workers=len(devices))


def units_of(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a model: the modules of its outermost lists and sequences that have modules and parameters."""
    for child in module.children():
        is_block = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, nn.ModuleList)
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from units_of(child)


WAYS: Mapping[str, Callable[[nn.Module, Sequence[torch.device]], nn.Module]] = {
    ALONE: lambda module, devices: module,
    "DataParallel": _wrapped,
    "composable.replicate": _replicated,
    "composable.fully_shard": _sharded,
}


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [loss] if loss is not None else [one for one in tree_flatten(output)[0] if _is_tensor(one)]
    return torch.stack([one.float().mean() for one in tensors if one.requires_grad]).sum()


def _pinned(arguments: Any) -> Any:
    """The arguments in pinned memory of the host, as a loader gives them."""

    def pin(one: Any) -> Any:
        if not _is_tensor(one):
            return one
        return (torch.empty_like(one, device="cpu") if one.is_meta else one.detach().cpu()).pin_memory()

    return tree_map(pin, arguments)


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


def _figures(done: Mapping[str, Planned]) -> Facts:
    """The fastest form, and what it gains."""
    times = {way: step.schedule.time for way, step in done.items() if way != ALONE}
    if not times:
        return Facts([])
    best = min(times, key=lambda way: times[way])
    rows = [(f"a step by {best}", f"{1e3 * times[best]:.1f} ms")]
    if ALONE in done:
        rows.append((f"times as fast as {ALONE}", f"{done[ALONE].schedule.time / times[best]:.2f}"))
    rows.append(("of it waiting for copies", f"{_exposed(done[best]):.0f} %"))
    rows.append(("at most on a device", _bytes(max(done[best].at_most))))
    return Facts(rows, "figures")


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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.itemsize for one in tensors)


def _bytes(count: int) -> str:
    power = next((power for power in (3, 2) if count >= 2 ** (10 * power)), 1)
    return f"{count / 2 ** (10 * power):,.1f} {' KMG'[power]}iB" if count else "0"
