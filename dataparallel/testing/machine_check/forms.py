"""Checks of each form: a step on all slots is the step of one device, with the options that people use.

In float64 numbers differ by at most 1e-9. The step of one device runs one chunk after the other (`InChunks`), because
kernels may round a whole batch otherwise than its chunks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dataparallel.forms.data_parallel import DataParallel
from dataparallel.forms.full_state import full_state_dict, load_full_state_dict
from dataparallel.forms.fully_shard import fully_shard
from dataparallel.forms.replicate import replicate
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.testing.cases import Case
from dataparallel.testing.machine_check.checks import Check, CheckedMachine, CheckFailed, NotHere, Seen
from dataparallel.testing.models.features import CASES

Form = Callable[..., Any]
"""Takes a module, slots and options of the form. Returns what is called in the module's place."""


def _wrapped(module: nn.Module, slots: Sequence[torch.device], **options: Any) -> Any:
    return DataParallel(module, slots, **options)


def _replicated(module: nn.Module, slots: Sequence[torch.device], **options: Any) -> Any:
    return replicate(module, devices=slots, **options)


def _sharded(module: nn.Module, slots: Sequence[torch.device], **options: Any) -> Any:
    return fully_shard(module, devices=slots, reshard_after_forward=False, **options)


FORMS: Mapping[str, Form] = {"DataParallel": _wrapped, "replicate": _replicated, "fully_shard": _sharded}

OPTIONS: Mapping[str, Mapping[str, Any]] = {"DataParallel": {}, "replicate": {}, "fully_shard": {"units": "auto"}}
"""With which the README shows each form."""

_BY_NAME = {case.name: case for case in CASES}
MODELS: Mapping[str, Case] = {
    "convolution net": _BY_NAME["convnet_train"],
    "transformer": _BY_NAME["gpt"],
    "model with buffers": _BY_NAME["spectral_norm"],
}


class InChunks(nn.Module):
    """Runs ``module`` on one chunk of the batch after the other, on one device. Only the first one changes buffers."""

    def __init__(self, module: nn.Module, chunks: int) -> None:
        super().__init__()
        self.module, self.chunks = module, chunks

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns the whole batch."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        first, *others = x.chunk(self.chunks)
        outputs = [self.module(first)]
        for chunk in others:
            own = {name: buffer.clone() for name, buffer in buffers.items()}
            outputs.append(functional_call(self.module, own, (chunk,)))
        return torch.cat(outputs)


@dataclass(frozen=True)
class Training:
    """How a model is trained: some steps of SGD with momentum, each with a batch in ``parts``.

    Attributes:
        tolerance: how much numbers may differ from those of one device.
        around: opens a context around each forward, for a type of device.
    """

    steps: int = 2
    parts: int = 1
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    around: Callable[[str], AbstractContextManager[Any]] = field(default=lambda device_type: nullcontext())

    def model(self, case: Case, device: torch.device) -> nn.Module:
        """The same weights at each call."""
        return case.build().to(device, self.dtype)

    def batches(self, case: Case, slots: int) -> Iterable[Tensor]:
        """A batch for each step, in host memory. The last slot has a smaller chunk than the others."""
        for step in range(self.steps):
            (batch,), _ = case.batch(self.parts * (3 * slots - 1), step)
            yield batch.to(self.dtype) if batch.is_floating_point() else batch

    def run(self, module: nn.Module, call: Callable[[Tensor], Tensor], case: Case, slots: int) -> dict[str, Tensor]:
        """Trains ``module`` by calls of ``call``. Returns outputs, gradients and state on the CPU, by name."""
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        device = next(module.parameters()).device
        results: dict[str, Tensor] = {}
        for step, batch in enumerate(self.batches(case, slots)):
            optimizer.zero_grad()
            for number, part in enumerate(batch.chunk(self.parts)):
                if (set_sync := getattr(module, "set_requires_gradient_sync", None)) is not None:
                    set_sync(number == self.parts - 1)
                with self.around(device.type):
                    output = call(part.to(device))
                output.double().square().mean().backward()
                results[f"step {step}: output of part {number}"] = output
            for name, gradient in gradients_of(module).items():
                results[f"step {step}: gradient of {name}"] = gradient
            optimizer.step()
        results |= {f"after training: {name}": _whole(tensor) for name, tensor in module.state_dict().items()}
        return {name: tensor.detach().cpu() for name, tensor in results.items()}

    def on_one_device(self, case: Case, machine: CheckedMachine) -> dict[str, Tensor]:
        """`run` without the library, on the first device."""
        module = self.model(case, machine.root)
        return self.run(module, InChunks(module, len(machine.slots)), case, len(machine.slots))

    def by_form(self, form: Form, case: Case, machine: CheckedMachine, **options: Any) -> dict[str, Tensor]:
        """`run` on all slots."""
        module = self.model(case, machine.root)
        return self.run(module, form(module, machine.slots, **options), case, len(machine.slots))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach().clone()


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients that the parameters have, whole and on the CPU, by name."""
    return {name: _whole(each.grad).cpu() for name, each in module.named_parameters() if each.grad is not None}


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> float:
    """Returns the largest difference. Raises `CheckFailed`, which names the first tensor that differs."""
    if found.keys() != expected.keys():
        names = ", ".join(sorted(found.keys() ^ expected.keys()))
        raise CheckFailed(f"{what}: only one of the two has {names}. {_REPORT}")
    largest = 0.0
    for name, wanted in expected.items():
        ours, theirs = found[name].double(), wanted.double()
        distance = float((ours - theirs).abs().max()) if theirs.numel() else 0.0
        if not distance <= tolerance:  # NaN too
            raise CheckFailed(f"{what}: {name} differs from one device by {distance:.2g}. {_REPORT}")
        largest = max(largest, distance)
    return largest


_REPORT = "Do not train with this here: open an issue with the JSON of this report"


# ---- the checks ------------------------------------------------------------------------------------------------------


def same_as_one_device(form: str, training: Training, options: Mapping[str, Any], machine: CheckedMachine) -> Seen:
    """Each model, trained by the form and on one device."""
    differences = {
        name: compare(
            training.by_form(FORMS[form], case, machine, **options),
            training.on_one_device(case, machine),
            training.tolerance,
            name,
        )
        for name, case in MODELS.items()
    }
    most = f"at most {max(differences.values()):.1e} from one device ({training.tolerance:g} is allowed)"
    return Seen(f"{', '.join(differences)}: outputs, gradients, weights {most}", differences)


def same_bits(form: str, machine: CheckedMachine) -> Seen:
    """The same steps twice."""
    for name, case in MODELS.items():
        first, second = (Training().by_form(FORMS[form], case, machine) for _ in range(2))
        for each, tensor in first.items():
            if not torch.equal(tensor, second[each]):
                raise CheckFailed(f"{name}: {each} has other bits in a second run. {_REPORT}")
    return Seen(f"{', '.join(MODELS)}: two runs, the same bits")


def checkpoint(form: str, machine: CheckedMachine) -> Seen:
    """What the form saves is loaded by one device, and what one device saves by the form."""
    training, case, slots = Training(), MODELS["transformer"], len(machine.slots)
    module = training.model(case, machine.root)
    call = FORMS[form](module, machine.slots)
    training.run(module, call, case, slots)
    file = io.BytesIO()
    torch.save(full_state_dict(module), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    alone, again = (training.model(case, machine.root) for _ in range(2))
    alone.load_state_dict(saved)
    other_call = FORMS[form](again, machine.slots)
    load_full_state_dict(again, alone.state_dict())
    batch = next(iter(training.batches(case, slots))).to(machine.root)
    with torch.no_grad():
        expected = {"output": InChunks(alone, slots)(batch).cpu()}
        for what, each in (("saved by the form", call), ("loaded by the form", other_call)):
            compare({"output": each(batch).cpu()}, expected, training.tolerance, what)
    return Seen(f"{len(saved)} tensors, saved and loaded in both directions")


def graphs(form: str, machine: CheckedMachine) -> Seen:
    """Captured replicas. What cannot be captured has to say why."""
    if machine.root.type != "cuda":
        raise NotHere(f"graphs are for CUDA devices, and {machine.root} is none")
    training, case, captured = Training(steps=8), MODELS["transformer"], []
    module = training.model(case, machine.root)
    call = FORMS[form](module, machine.slots, graphs=True)
    found = training.run(module, call, case, len(machine.slots))
    difference = compare(found, training.on_one_device(case, machine), training.tolerance, "transformer")
    replicas = (call.options if form == "DataParallel" else _STATE[form](module)).graphs.replicas
    captured = [replica for replica in replicas if replica.captures]
    reasons = {reason for replica in replicas for reason in replica.reasons}
    if not captured:
        raise NotHere(f"nothing was captured: {'; '.join(reasons) or 'no reason is given'}")
    return Seen(
        f"transformer: {len(captured)} of {len(replicas)} captured, at most {difference:.1e} from one device",
        {"captured": len(captured), "replicas": len(replicas), "reasons": sorted(reasons)},
    )


_STATE: Mapping[str, Callable[[nn.Module], Any]] = {"replicate": replicate.state, "fully_shard": fully_shard.state}


def compiled(form: str, machine: CheckedMachine) -> Seen:
    """Compiled replicas. Where inductor has no compiler for the devices, dynamo and autograd are traced without it."""
    backend = "inductor" if machine.has_gpus else "aot_eager"
    training, case = Training(tolerance=1e-8), MODELS["transformer"]
    torch.compiler.reset()
    found = training.by_form(FORMS[form], case, machine, compile={"backend": backend})
    difference = compare(found, training.on_one_device(case, machine), training.tolerance, "transformer")
    return Seen(f"transformer by {backend}: at most {difference:.1e} from one device")


_AUTOCAST = Training(
    dtype=torch.float32,
    tolerance=1e-2,
    around=lambda device_type: torch.autocast(device_type, torch.bfloat16, cache_enabled=False),
)
_ACCUMULATION = Training(parts=3)


def _checks_of(form: str) -> list[Check]:
    return [
        Check(form, "float64", partial(same_as_one_device, form, Training(), {})),
        Check(form, "mixed precision", partial(same_as_one_device, form, _AUTOCAST, OPTIONS[form])),
        Check(form, "accumulation", partial(same_as_one_device, form, _ACCUMULATION, {})),
        Check(form, "same bits twice", partial(same_bits, form)),
        Check(form, "checkpoint", partial(checkpoint, form)),
        Check(form, "graphs=True", partial(graphs, form), hangs_after=60),
        Check(form, "compile=True", partial(compiled, form), hangs_after=120, takes=20),
    ]


CHECKS = tuple(check for form in FORMS for check in _checks_of(form))
