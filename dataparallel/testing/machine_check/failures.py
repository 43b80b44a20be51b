"""Checks of what fails: the original error is raised, memory is free again, and the next step is right."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.comm.streams.held import let_go_of_passed
from dataparallel.devices import CPU
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, CheckFailed, NotHere, Seen
from dataparallel.testing.machine_check.forms import FORMS, InChunks, compare, gradients_of

_WIDTH = 16
_MEMORY = "Memory of a failed call is not free, so training after it may run out: open an issue with the JSON"


class PlannedError(Exception):
    """What a replica of `Failing` raises. Its constructor is odd, as those of some libraries are."""

    def __init__(self, *, replica: str) -> None:
        super().__init__(f"planned, in {replica}")


class Failing(nn.Module):
    """A small net. Where a sample of ``x`` begins with `FAIL`, its forward fails, as ``how`` says, or its backward."""

    FAIL = 1e6

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``(n, 16)`` in, ``(n, 1)`` out."""
        fails = bool((x[:, 0] == self.FAIL).any())
        output: Tensor = self.net(x)
        if fails and self.how == "forward":
            raise PlannedError(replica=str(x.device))
        if fails and self.how == "memory":
            torch.empty(_more_than_free(x.device), dtype=torch.uint8, device=x.device)
        if fails and self.how == "backward":
            output.register_hook(_raise)
        return output


def _raise(gradient: Tensor) -> None:
    raise PlannedError(replica=f"the backward on {gradient.device}")


def _more_than_free(device: torch.device) -> int:
    return 2 * int(torch.accelerator.get_memory_info(device)[1])


def raises_and_goes_on(form: str, how: str, machine: CheckedMachine) -> Seen:
    """A step that fails on the last slot, and then the same step without the failure."""
    if how == "memory" and (problem := _why_no_limit(machine)):
        raise NotHere(problem)
    expected_error: type[BaseException] = torch.OutOfMemoryError if how == "memory" else PlannedError
    torch.manual_seed(0)
    module = Failing(how).double().to(machine.root)
    alone = Failing(how).double().to(machine.root)
    alone.load_state_dict(module.state_dict())
    call = FORMS[form](module, machine.slots)
    x = torch.linspace(-1, 1, _WIDTH * 3 * len(machine.slots), dtype=torch.float64).view(-1, _WIDTH).to(machine.root)
    bad = x.clone()
    bad[-1, 0] = Failing.FAIL
    before: dict[torch.device, int] = {}
    for _ in range(2):  # what is kept from step to step is there after the first
        call(x).square().mean().backward()
        module.zero_grad()
        before = _allocated(machine)
    try:
        call(bad).square().mean().backward()
    except expected_error as error:
        said = f"as planned, {type(error).__name__} {_first_note(error)}".rstrip()
    except Exception as error:
        raise CheckFailed(f"{expected_error.__name__} became {type(error).__name__}: {error}") from error
    else:
        raise CheckFailed(f"the {how} of the last replica has failed, and nothing was raised: open an issue")
    module.zero_grad()
    output = call(x)
    output.square().mean().backward()
    wanted = InChunks(alone, len(machine.slots))(x)
    wanted.square().mean().backward()
    compare({"output": output.cpu()}, {"output": wanted.cpu()}, 1e-9, "the step after a failure")
    compare(gradients_of(module), gradients_of(alone), 1e-9, "the step after a failure")
    for each in (module, alone):
        each.zero_grad()
    del output, wanted
    for device, now in _allocated(machine).items():
        if now > before[device]:
            raise CheckFailed(f"{now - before[device]} bytes more are allocated on {device} after {said}. {_MEMORY}")
    return Seen(f"{said}; the next step is that of one device{', and takes no more memory' if before else ''}")


def _why_no_limit(machine: CheckedMachine) -> str:
    if machine.root == CPU:
        return "the CPU's memory has no limit that a check may reach"
    try:
        _more_than_free(machine.root)
    except RuntimeError as error:
        return f"{machine.root} tells no limit of its memory ({error})"
    return ""


def _allocated(machine: CheckedMachine) -> dict[torch.device, int]:
    machine.synchronize()
    gc.collect()
    let_go_of_passed()
    return {device: torch.accelerator.memory_allocated(device) for device in machine.devices if device != CPU}


def _first_note(error: BaseException) -> str:
    notes: list[Any] = getattr(error, "__notes__", [])
    return str(notes[0]) if notes else ""


_WAYS = {"forward": "an error in forward", "backward": "an error in backward", "memory": "out of memory on one device"}

CHECKS = tuple(
    Check(form, name, partial(raises_and_goes_on, form, how)) for form in FORMS for how, name in _WAYS.items()
)
