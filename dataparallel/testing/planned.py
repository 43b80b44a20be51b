"""`planned`: a training step of a user's model by one form, on simulated devices that skip kernels.

A timeline predicts how long it would take. ``model_report`` makes a report of such steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from dataparallel.testing.simulated import device_module as sim
from dataparallel.testing.simulated.timeline import HOST, Machine, Schedule

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


def made(make: Make) -> tuple[nn.Module, Any]:
    """What the user's function returns, checked."""
    found = make()
    if isinstance(found, tuple) and len(found) == 2:
        module, arguments = found
        if isinstance(module, nn.Module) and isinstance(arguments, (tuple, dict)):
            return module, arguments
    what = f"({', '.join(type(one).__name__ for one in found)})" if isinstance(found, tuple) else type(found).__name__
    raise argparse.ArgumentTypeError(
        "--model: the function returns (module, arguments): a torch.nn.Module, and a tuple of positional arguments "
        f"or a dict of keyword arguments of one call; got {what}"
    )


def planned(make: Make, way: str, devices: Sequence[torch.device], machine: Machine) -> Planned:
    """Runs steps of a new model by one of `WAYS`, and records the last."""
    gc.collect()
    before = [sim.memory_allocated(device) for device in devices]
    module, arguments = made(make)
    module = _on_device(module, devices[0])
    network, arguments = WAYS[way](module, devices), pinned(arguments)
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.1)

    def step() -> None:
        given = arguments
        if way == ALONE:
            given = tree_map_only(Tensor, lambda one: one.to(devices[0], non_blocking=True), given)
        _loss(network(**given) if isinstance(given, dict) else network(*given)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    for device in devices:
        sim.synchronize(device)
        sim.reset_peak_memory_stats(device)
    between = [sim.memory_allocated(device) for device in devices]
    with sim.timeline() as timeline, sim.counted() as counts:
        step()
    return Planned(
        timeline.schedule(machine),
        [counts.copied[HOST, device.index] for device in devices],
        [counts.received(device) for device in devices],
        [counts.sent(device) for device in devices],
        [now - then for now, then in zip(between, before, strict=True)],
        [sim.max_memory_allocated(device) - then for device, then in zip(devices, before, strict=True)],
    )


def _on_device(module: nn.Module, device: torch.device) -> nn.Module:
    if not any(one.is_meta for one in module.parameters()):
        return module.to(device)
    # Not to_empty, which makes two of a parameter that two modules share.
    empty = {id(one): torch.empty_like(one, device=device) for one in (*module.parameters(), *module.buffers())}
    empty |= {id(one): nn.Parameter(empty[id(one)], one.requires_grad) for one in module.parameters()}
    return copy.deepcopy(module, empty)


def _sharded(module: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    for unit in units_of(module):
        fully_shard(unit, devices=devices)
    return fully_shard(module, devices=devices, workers=len(devices))


def units_of(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a model: the modules of its outermost lists and sequences that have modules and parameters."""
    for child in module.children():
        is_block = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, nn.ModuleList)
        if is_block and any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from units_of(child)


# All replicas run at a time. Otherwise the library would time kernels, which are skipped.
WAYS: Mapping[str, Callable[[nn.Module, Sequence[torch.device]], nn.Module]] = {
    ALONE: lambda module, devices: module,
    "DataParallel": lambda module, devices: DataParallel(module, devices, workers=len(devices)),
    "composable.replicate": lambda module, devices: replicate(module, devices=devices, workers=len(devices)),
    "composable.fully_shard": _sharded,
}


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [one for one in tree_leaves(output if loss is None else loss) if isinstance(one, Tensor)]
    return torch.stack([one.float().mean() for one in tensors if one.requires_grad]).sum()


def pinned(arguments: Any) -> Any:
    """The arguments in pinned memory of the host, as a loader gives them."""

    def pin(one: Tensor) -> Tensor:
        return (torch.empty_like(one, device="cpu") if one.is_meta else one.detach().cpu()).pin_memory()

    return tree_map_only(Tensor, pin, arguments)
