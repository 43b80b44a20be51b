"""What ``fully_shard`` does with other machines before it changes anything: checks, and rank 0's values for all.

All ranks apply the form to the same modules in the same order, and compare each time what they are about to do. This
file imports the room of machines only if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel.forms.managed import own_modules
from dataparallel.replicas.plan import dotted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from dataparallel.sharded.units.over_machines import MachinesOfTree


def machines_for(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device]
) -> MachinesOfTree | None:
    """What the arguments mean; ``None`` for this machine alone.

    Raises:
        TypeError, ValueError, RuntimeError: as ``machines.arguments.shard_and_replicate_groups``.
    """
    if process_group is None and mesh is None:
        return None
    from dataparallel.machines.arguments import shard_and_replicate_groups
    from dataparallel.sharded.units.over_machines import MachinesOfTree

    return MachinesOfTree(*shard_and_replicate_groups(process_group, mesh, slots))


def failing_together(machines: MachinesOfTree | None) -> AbstractContextManager[None]:
    """Around checks that this rank makes by itself: if one fails, the others raise instead of waiting for it."""
    if machines is None:
        return nullcontext()
    from dataparallel.machines.start import failing_together

    return failing_together(machines.all)


def compare_start(
    machines: MachinesOfTree,
    modules: Sequence[nn.Module],
    parameters: Sequence[tuple[str, nn.Parameter]],
    slots: Sequence[torch.device],
    settings: Mapping[str, Any],
) -> None:
    """All ranks compare what they are about to do, and make what they need for it.

    Raises:
        dataparallel.machines.errors.MachinesDiffer: ranks differ; the message names what differs and where.
    """
    from dataparallel.machines.start import compare, describe

    names = " and ".join(type(module).__name__ for module in modules)
    description = describe(dict(parameters), _buffers(modules), slots, settings)
    compare(machines.all, f"fully_shard of {names}", description)
    machines.make_communicators(slots)


def send_values(machines: MachinesOfTree, modules: Sequence[nn.Module], parameters: Mapping[str, Tensor]) -> None:
    """Gives these parameters and the buffers of the modules the values of the first rank, on all ranks.

    Those on meta have no values yet: ``units.over_machines`` sends them later.
    """
    from dataparallel.machines.start import send_values

    named = {**parameters, **_buffers(modules)}
    send_values(machines.all, {name: tensor for name, tensor in named.items() if not tensor.is_meta})


def _buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        dotted(name, key): buffer
        for name, module in own_modules(modules)
        for key, buffer in module._buffers.items()
        if buffer is not None
    }
