"""`machines_of` and its neighbours interpret ``process_group=``, ``mesh=`` and ``device_id=``, and refuse some modules.

All of them are checked before anything is sent. Each error says what was passed, what was expected and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataparallel.devices import DeviceLike
from dataparallel.machines.group import Machines

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def machines_of(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device] = ()
) -> Machines | None:
    """The machines over which a module is replicated; ``None`` if neither a group nor a mesh is given.

    A machine is a process that is a member of the group, or of the mesh of one dimension.
    """
    if not _is_given(process_group, mesh):
        return None
    if mesh is None:
        return _of_group(process_group)
    _check_mesh(mesh, slots)
    if mesh.ndim != 1:
        raise ValueError(
            f"{_shown(mesh)} has {mesh.ndim} dimensions, and a module is replicated over one dimension of processes: "
            f"{_one_dimension(mesh)}"
        )
    return _of_mesh(mesh, 0)


def shard_and_replicate_groups(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device] = ()
) -> tuple[Machines | None, Machines | None]:
    """The machines over which each device's shard is sharded again, and the machines over which it is replicated.

    With a group parameters are sharded over the devices of each machine and replicated over machines. A mesh means what
    it means for ``torch.distributed.fsdp.fully_shard``, over processes: a single dimension shards; of two dimensions
    the first one replicates and the second one shards. Each result may be ``None``.
    """
    if not _is_given(process_group, mesh):
        return None, None
    if mesh is None:
        return None, _of_group(process_group)
    _check_mesh(mesh, slots)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{_shown(mesh)} has {mesh.ndim} dimensions; expected one, to shard over, or two: the first to replicate "
            f"over, the second to shard over. {_one_dimension(mesh, 'one or two dimensions')}"
        )
    if mesh.ndim == 1:
        return _of_mesh(mesh, 0), None
    return _of_mesh(mesh, 1), _of_mesh(mesh, 0)


def one_device(devices: Sequence[DeviceLike] | None, device_id: DeviceLike | None) -> Sequence[DeviceLike] | None:
    """The argument ``devices``, for functions in which ``device_id=x`` means ``devices=[x]``."""
    if device_id is None:
        return devices
    if isinstance(device_id, (list, tuple)):
        raise TypeError(f"device_id={device_id!r}: expected one device; several are written devices={device_id!r}")
    if devices is not None:
        raise ValueError(
            f"pass devices or device_id, not both: device_id={device_id!r} is devices=[{device_id!r}], and "
            f"devices={devices!r} was passed too"
        )
    return [device_id]


def refuse_tensor_parallel(module: nn.Module) -> None:
    """Raises a ``TypeError`` if parameters or buffers are of the class ``DTensor``."""
    # If torch.distributed.tensor was not imported, there is no DTensor. Importing it takes long.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    found = [name for name, tensor in named if isinstance(tensor, kind)]
    if not found:
        return
    names = ", ".join(map(repr, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    raise TypeError(
        f"{names} of the {type(module).__name__} {'is a DTensor' if len(found) == 1 else 'are DTensors'}: processes "
        "divide the module among them already, as with parallelize_module or torch's fully_shard. dataparallel takes "
        "plain parameters, whole on each machine. Give it the module before it is parallelised; or keep tensor "
        "parallelism and use torch.distributed.fsdp.fully_shard on a mesh of two dimensions instead"
    )


def _is_given(process_group: object, mesh: object) -> bool:
    """True if a group or a mesh is given. Raises if both are, or if torch.distributed is not ready."""
    if process_group is None and mesh is None:
        return False
    name = "mesh" if process_group is None else "process_group"
    if process_group is not None and mesh is not None:
        raise ValueError("pass process_group or mesh, not both: a mesh has groups of its own")
    if not torch.distributed.is_available():
        raise RuntimeError(
            f"{name} was passed, but torch {torch.__version__} has been built without torch.distributed; install a "
            f"build that has it, or leave {name} out to use this machine alone"
        )
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{name} was passed, but torch.distributed is not initialised in this process, or not any more. Call "
            "torch.distributed.init_process_group() first, in each process, for example under torchrun"
        )
    return True


def _of_group(group: Any) -> Machines:
    distributed = torch.distributed
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group: this process, rank {distributed.get_rank()} of all, is no member of the group. Call this "
            "only in processes that are among the ranks that new_group was called with"
        )
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"process_group={group!r}: expected a torch.distributed.ProcessGroup, such as "
            "torch.distributed.group.WORLD or what torch.distributed.new_group(ranks) returns"
        )
    try:
        distributed.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise RuntimeError(
            "process_group has been destroyed, or belongs to a torch.distributed that has been; pass a group that was "
            "made since the last init_process_group()"
        ) from None
    return Machines.of(group)


def _check_mesh(mesh: Any, slots: Sequence[torch.device]) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh={mesh!r}: expected a torch.distributed.device_mesh.DeviceMesh over processes, as "
            "init_device_mesh('cpu', (torch.distributed.get_world_size(),)) returns; slots are written devices=[...]"
        )
    types = {slot.type for slot in slots}
    if types and mesh.device_type not in (*types, "cpu"):
        ours = ", ".join(sorted(types))
        wanted = f"{ours} or cpu" if ours != "cpu" else "cpu"
        raise ValueError(
            f"{_shown(mesh)} is for devices of type {mesh.device_type}, and the slots of this process are of type "
            f"{ours}; pass a mesh that init_device_mesh made for {wanted}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{_shown(mesh)}: this process, rank {torch.distributed.get_rank()} of all, is not in the mesh. Call this "
            "only in processes that are"
        )


def _of_mesh(mesh: DeviceMesh, dim: int) -> Machines:
    try:
        group = mesh.get_group(dim)
    except RuntimeError as error:
        raise RuntimeError(
            f"{_shown(mesh)} has no process group for dimension {dim}: {error}. Pass a mesh that init_device_mesh or "
            "DeviceMesh(...) has made with its groups"
        ) from error
    return Machines.of(group)


def _one_dimension(mesh: DeviceMesh, wanted: str = "one dimension") -> str:
    names = mesh.mesh_dim_names
    if not names:
        return f"Pass a mesh that has {wanted}, or name its dimensions and pass a part: mesh['name']"
    return f"Pass a part of it that has {wanted}, such as mesh[{names[0]!r}]"


def _shown(mesh: DeviceMesh) -> str:
    """The mesh in words, for messages."""
    names = mesh.mesh_dim_names or ()
    sizes = [f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True)] if names else map(str, mesh.shape)
    return f"the mesh ({', '.join(sizes)})"
