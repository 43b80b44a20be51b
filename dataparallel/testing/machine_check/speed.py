"""Measures how fast: bytes per second of each transport, and training steps by each form and by what else there is.

Steps of one device, of ``torch.nn.DataParallel`` and of the forms are timed in this process, those of DDP and FSDP2 in
a process for each device. Each number is a median, with the interval in which the median lies with 95 %.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.settings import TRANSPORTS
from dataparallel.comm.tables import Place, Table, TableRow
from dataparallel.devices import CPU
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, NotHere, Seen
from dataparallel.testing.machine_check.forms import FORMS, OPTIONS
from dataparallel.testing.machine_check.processes import timed_in_processes
from dataparallel.testing.machine_check.trained_models import LAUNCH_BOUND, MODELS, TrainedModel, training_step
from dataparallel.testing.machine_check.transfers import need_kernels

_BYTES = 64 * 2**20
_LEAST, _MOST = 5, 50  # times that make a median
_ONE_WAY = 6.0  # seconds that the slowest way may take at least
_SHARE = 0.25  # of the time that is left, for one model or transport


def median_and_interval(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The median, and order statistics between which it lies with at least 95 % if there are six times or more.

    By the binomial distribution of how many times lie below the median (David and Nagaraja, "Order Statistics").
    """
    ordered, count = sorted(seconds), len(seconds)
    rank = max(0, int(count / 2 - 0.98 * count**0.5))
    return statistics.median(ordered), ordered[rank], ordered[count - 1 - rank]


def times_of(run: Callable[[], object], machine: CheckedMachine, seconds: float, warm_up: int = 3) -> list[float]:
    """Seconds of each of several runs, from idle devices to idle devices, for about ``seconds`` in all."""
    for _ in range(warm_up):
        run()
    machine.synchronize()
    gc.collect()
    gc.freeze()  # earlier checks have imported a compiler: a million objects, which no step should walk through
    found: list[float] = []
    ends = time.monotonic() + seconds
    try:
        while len(found) < _LEAST or (len(found) < _MOST and time.monotonic() < ends):
            begin = time.perf_counter()
            run()
            machine.synchronize()
            found.append(time.perf_counter() - begin)
    finally:
        gc.unfreeze()
    return found


def _needs_gpus(machine: CheckedMachine) -> None:
    if not machine.has_gpus:
        raise NotHere("these are no GPUs")


def rates(name: str, machine: CheckedMachine) -> Seen:
    """Bytes per second by one transport: of copies between each two devices, of a broadcast, a sum and a gather."""
    _needs_gpus(machine)
    pairs, slots = machine.pairs, machine.devices
    flat = {slot: torch.zeros(_BYTES // 4, device=slot) for slot in slots}
    seconds = _SHARE * machine.seconds_left() / (len(pairs) + 3)
    found: dict[str, Any] = {}

    def rate(run: Callable[[], object]) -> float:
        return _BYTES / statistics.median(times_of(run, machine, seconds, warm_up=2)) / 1e9

    with comm.using(transport=name):
        try:
            between = {
                f"{one} to {other}": rate(partial(comm.broadcast, flat[one], out=[flat[other]])) for one, other in pairs
            }
            found["broadcast"] = rate(partial(comm.broadcast, flat[slots[0]], slots))
            found["sum"] = rate(partial(comm.reduce_add, [*flat.values()], slots[0]))
            found["gather"] = rate(partial(comm.gather, [each[: len(each) // len(slots)] for each in flat.values()]))
        except ValueError as error:
            raise NotHere(str(error)) from error
    low, high = min(between, key=lambda pair: between[pair]), max(between.values())
    collectives = ", ".join(f"{work} {value:.1f}" for work, value in found.items())
    text = f"GB/s: pairs {between[low]:.1f} ({low}) to {high:.1f}, {collectives}"
    return Seen(text, {"pairs": between, **found})


def rates_of_kernels(machine: CheckedMachine) -> Seen:
    """Bytes read and written per second by one launch on the first device, from the last one, beside torch's copy."""
    _needs_gpus(machine)
    need_kernels(machine)
    root, last, terms = machine.root, machine.devices[-1], 8
    sources = [torch.rand(2 * _BYTES // 4, device=last) for _ in range(terms)]
    target = torch.zeros_like(sources[0], device=root)
    found = {"torch's copy": 2 * target.nbytes / _on_device(lambda: target.copy_(sources[0]), root) / 1e9}
    for name, dtype, count in (
        ("copy", torch.float32, 1), ("sum of 2", torch.float32, 2), ("sum of 8", torch.float32, terms),
        ("sum of 8 in bfloat16", torch.bfloat16, terms),
    ):  # fmt: skip
        rows: Table = [TableRow(Place(0, 0), tuple(Place(1 + k, 0) for k in range(count)), target.view(dtype).numel())]
        launch = partial(DeviceTable(rows, root, dtype).launch, [each.view(dtype) for each in (target, *sources)])
        found[name] = (1 + count) * target.nbytes / _on_device(launch, root) / 1e9
    shown = ", ".join(f"{name} {rate:.0f}" for name, rate in found.items())
    ratio = _small_tensors(sources[0], target)
    return Seen(
        f"GB/s: {shown}; 1,000 tensors of 4 KiB in one launch {ratio:.1f} times as fast as by torch's flatten, copy, "
        "unflatten",
        {**found, "flatten, copy, unflatten": ratio},
    )


def _small_tensors(source: Tensor, target: Tensor, count: int = 1000, numel: int = 1024) -> float:
    """How many times as fast one launch copies many small tensors with gaps between as torch by a flat buffer."""
    rows = [TableRow(Place(1, 2 * numel * at), (Place(0, 2 * numel * at),), numel) for at in range(count)]
    ours, theirs = ([*each[: 2 * numel * count].view(count, 2, numel)[:, 0].unbind()] for each in (source, target))

    def flatten_copy_unflatten() -> None:
        torch._foreach_copy_(theirs, [*torch.cat(ours).to(target.device).split(numel)])

    launch = partial(DeviceTable(rows, target.device, source.dtype).launch, [source, target])
    return _on_device(flatten_copy_unflatten, target.device) / _on_device(launch, target.device)


def _on_device(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device of one of several runs in a row: the median of five."""
    found, count = [], 20
    run()
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        for _ in range(count):
            run()
        end.record(stream)
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(found)


def steps(model: TrainedModel, machine: CheckedMachine) -> Seen:
    """Training steps of one model: of one device with its part of the batch, and of all devices in each way."""
    if not machine.has_gpus and model is not LAUNCH_BOUND:
        raise NotHere("these are no GPUs, and it would take too long")
    ways: dict[str, Callable[..., Any]] = {
        "one device": lambda module: module,
        "its parts in turn": partial(_in_turn, machine),
        "torch.nn.DataParallel": _by_torch(machine),
        **{name: partial(form, slots=machine.slots, **OPTIONS[name]) for name, form in FORMS.items()},
    }
    if machine.has_gpus:
        ways |= {f"{name}, graphs": partial(ways[name], graphs=True) for name in FORMS}
    seconds = _SHARE * machine.seconds_left() / len(ways)
    warm_up = 6 if machine.has_gpus else 3  # on GPUs replicas are captured in the first five steps
    found: dict[str, Any] = {}
    for name, make in ways.items():
        if machine.seconds_left() < _ONE_WAY:
            found[name] = "no time"
            continue
        try:
            module, is_alone = model.model(machine.root), name == "one device"
            batch = model.batch(1 if is_alone else len(machine.slots), machine.root if is_alone else CPU)
            run = training_step(module, make(module), *batch)
            found[name] = median_and_interval(times_of(run, machine, seconds, warm_up))
        except torch.OutOfMemoryError as error:
            found[name] = f"out of memory: {error}"
        except NotHere as reason:
            found[name] = str(reason)
    try:
        with tempfile.TemporaryDirectory() as directory:
            found |= {
                name: median_and_interval(times)
                for name, times in timed_in_processes(model, machine, seconds, Path(directory)).items()
            }
    except NotHere as reason:
        found["processes"] = str(reason)
    shown = [
        f"{name} {1e3 * value[0]:.1f} ({1e3 * value[1]:.1f} to {1e3 * value[2]:.1f})"
        if isinstance(value, tuple)
        else f"{name}: {value}"
        for name, value in found.items()
    ]
    return Seen("ms of a step, one device with its part of the batch: " + ", ".join(shown), found)


def _in_turn(machine: CheckedMachine, module: nn.Module) -> Callable[..., Tensor]:
    """What slots on one device do, without the library."""
    if len(machine.devices) > 1:
        raise NotHere("for several slots on one device")

    def call(*batch: Tensor) -> Tensor:
        parts = zip(*(each.chunk(len(machine.slots)) for each in batch), strict=True)
        return torch.cat([module(*(each.to(machine.root) for each in part)) for part in parts])

    return call


def _by_torch(machine: CheckedMachine) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        if machine.root.type != "cuda" or len(machine.devices) < 2:
            raise NotHere("needs two CUDA devices")
        return nn.DataParallel(module, [device.index for device in machine.devices])

    return make


CHECKS = (
    Check("speed", "rates of kernels", rates_of_kernels, hangs_after=60),
    *(Check("speed", f"rates by {name}", partial(rates, name), hangs_after=60) for name in TRANSPORTS),
    *(Check("speed", model.name, partial(steps, model), hangs_after=120) for model in MODELS),
)
