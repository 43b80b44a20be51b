"""Checks of what surrounds a step: streams of the user, pinned batches, random numbers, memory after many steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import streams_set
from dataparallel.devices import CPU
from dataparallel.forms.prefetch import prefetch
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, CheckFailed, NotHere, Seen
from dataparallel.testing.machine_check.forms import FORMS, MODELS, Training, compare, gradients_of

STEPS, SETTLED = 200, 20
_CASE = MODELS["transformer"]


@contextmanager
def _streams_of_the_user(machine: CheckedMachine) -> Iterator[None]:
    """Makes a new stream current on each device. Work before and after comes in order."""
    if machine.root == CPU:
        raise NotHere("the CPU has no streams")
    machine.synchronize()
    try:
        with streams_set({device: torch.Stream(device) for device in machine.devices}):
            yield
    finally:
        machine.synchronize()


def other_streams(form: str, machine: CheckedMachine) -> Seen:
    """Training where the current stream of each device is not the default one, and the batch comes from a third."""
    training, slots = Training(steps=3), len(machine.slots)
    expected = training.on_one_device(_CASE, machine)
    with _streams_of_the_user(machine):
        module = training.model(_CASE, machine.root)
        call, side = FORMS[form](module, machine.slots), torch.Stream(machine.root)

        def from_side(batch: Tensor) -> Tensor:
            current = torch.accelerator.current_stream(machine.root)
            side.wait_stream(current)
            with streams_set({machine.root: side}):
                made = batch + 0
            current.wait_stream(side)
            made.record_stream(current)
            output: Tensor = call(made)
            return output

        found = training.run(module, from_side, _CASE, slots)
    difference = compare(found, expected, training.tolerance, "with other current streams")
    return Seen(f"{training.steps} steps on streams of the user: at most {difference:.1e} from one device")


def pinned_batches(machine: CheckedMachine) -> Seen:
    """A `DataLoader` with pinned memory, whose batches are sent ahead."""
    if machine.root == CPU or not can_pin(machine.root.type):
        raise NotHere(f"{machine.root} has no pinned memory")
    torch.manual_seed(0)
    slots, width = len(machine.slots), 64
    module = nn.Linear(width, width).double().to(machine.root)
    call = FORMS["DataParallel"](module, machine.slots)
    data = torch.arange(20 * slots * width, dtype=torch.float64).sin().view(-1, width)
    loader = DataLoader(TensorDataset(data), batch_size=2 * slots, pin_memory=True)
    with torch.no_grad():
        found = torch.cat([call(batch).cpu() for (batch,) in prefetch(loader, call)])
        expected = module(data.to(machine.root)).cpu()
    difference = compare({"output": found}, {"output": expected}, 1e-9, "with batches that are sent ahead")
    return Seen(f"{len(loader)} batches by prefetch: at most {difference:.1e} from one device")


class _Drops(nn.Module):
    """Dropout in a checkpoint, which computes it twice and needs the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(32, 256), nn.Dropout(0.5), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda each: self.drop(self.first(each)), x, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        # `x` may be large, `last` sees which elements were dropped: another mask in backward changes its gradient.
        output: Tensor = self.last(hidden)
        return output


def random_numbers(form: str, machine: CheckedMachine) -> Seen:
    """With a seed a run repeats, also with dropout in checkpoints; and the host's generator goes on as without them."""
    x = torch.linspace(-1, 1, 32 * 8 * len(machine.slots), dtype=torch.float64).view(-1, 32).to(machine.root)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _Drops().double().to(machine.root)
        call = FORMS[form](module, machine.slots)
        runs, draws = [], []
        for _ in range(3):
            module.zero_grad()
            torch.manual_seed(1)
            call(x).square().mean().backward()
            draws.append(torch.rand(8))
            runs.append(gradients_of(module))
    for number, (run, draw) in enumerate(zip(runs[1:], draws[1:], strict=True), start=2):
        if not torch.equal(draw, draws[0]):
            raise CheckFailed(
                f"after the same seed and a step, the host draws other numbers in run {number}: the step does not "
                "leave the host's generator where it was, and shuffles do not repeat. Open an issue with the JSON"
            )
        compare(run, runs[0], 0.0, f"with one seed, run {number}")
    return Seen("dropout in a checkpoint: one seed, the same gradients and the same numbers afterwards")


def constant_memory(form: str, machine: CheckedMachine) -> Seen:
    """The bytes that are allocated on each device, after some steps and after many."""
    if machine.root == CPU:
        raise NotHere("the CPU counts no memory")
    training, slots = Training(), len(machine.slots)
    module = training.model(_CASE, machine.root)
    call = FORMS[form](module, machine.slots)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batch = next(iter(training.batches(_CASE, slots))).to(machine.root)
    held: dict[torch.device, int] = {}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        call(batch).square().mean().backward()
        optimizer.step()
        if step in (SETTLED, STEPS):
            machine.synchronize()
            gc.collect()
            now = {device: torch.accelerator.memory_allocated(device) for device in machine.devices}
            grown = {device: now[device] - bytes_ for device, bytes_ in held.items() if now[device] > bytes_}
            held = now
    if grown:
        device, more = max(grown.items(), key=lambda item: item[1])
        raise CheckFailed(
            f"memory leaks: between step {SETTLED} and step {STEPS}, {more} bytes more are allocated on {device}. Open "
            "an issue with the JSON of this report"
        )
    return Seen(
        f"{STEPS} steps: {max(held.values())} bytes on a device, as after {SETTLED}", {"bytes": max(held.values())}
    )


CHECKS = (
    *(Check(form, "streams of the user", partial(other_streams, form)) for form in FORMS),
    Check("DataParallel", "pinned batches", pinned_batches),
    *(Check(form, "random numbers", partial(random_numbers, form)) for form in FORMS),
    *(Check(form, "memory", partial(constant_memory, form), hangs_after=120, takes=10) for form in FORMS),
)
