"""`machines_of` and its neighbours interpret ``process_group=`` and ``mesh=``. `MachineMesh` is what both groups give.

All of them are checked before anything is sent. Each error says what was passed, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.arguments import checked
from dataparallel.machines.lanes import Machines
from dataparallel.machines.peer_rounds import PeerRounds
from dataparallel.machines.start import send_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def machines_of(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device] = ()
) -> Machines | None:
    """The machines over which a module is replicated; ``None`` if neither a group nor a mesh is given.

    A machine is a process that is a member of the group, or of the mesh of one dimension.
    """
    wanted = ", and a module is replicated over one dimension of processes", "one dimension", 1
    found = _groups(process_group, mesh, slots, wanted)
    return found[0] if found else None


def shard_and_replicate_groups(
    process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device] = ()
) -> tuple[Machines | None, Machines | None]:
    """The machines over which each device's shard is sharded again, and the machines over which it is replicated.

    With a group parameters are sharded over the devices of each machine and replicated over machines. A mesh means what
    it means for ``torch.distributed.fsdp.fully_shard``, over processes: a single dimension shards; of two dimensions
    the first one replicates and the second one shards. Each result may be ``None``.
    """
    wanted = "; expected one, to shard over, or two: the first to replicate over, the second to shard over"
    found = _groups(process_group, mesh, slots, (wanted, "one or two dimensions", 2))
    if not found:
        return None, None
    return (None, found[0]) if mesh is None else (found[-1], found[0] if len(found) == 2 else None)


def _groups(group: Any, mesh: Any, slots: Sequence[torch.device], wanted: tuple[str, str, int]) -> list[Machines]:
    """The machines of the group, or of each dimension of the mesh, of which there are at most ``wanted[2]``."""
    if group is None and mesh is None:
        return []
    name, distributed = "mesh" if group is None else "process_group", torch.distributed
    if group is not None and mesh is not None:
        raise ValueError("pass process_group or mesh, not both: a mesh has groups of its own")
    if not distributed.is_available():
        raise RuntimeError(
            f"{name} was passed, but torch {torch.__version__} has been built without torch.distributed; install a "
            f"build that has it, or leave {name} out to use this machine alone"
        )
    if mesh is not None:
        from torch.distributed.device_mesh import DeviceMesh

        made = "init_device_mesh('cpu', (torch.distributed.get_world_size(),))"
        checked("mesh", mesh, DeviceMesh, hint=f" over processes, as {made} returns; slots are written devices=[...]")
    elif group != distributed.GroupMember.NON_GROUP_MEMBER:
        hint = ", such as torch.distributed.group.WORLD or what torch.distributed.new_group(ranks) returns"
        checked("process_group", group, distributed.ProcessGroup, hint=hint)
    if not distributed.is_initialized():
        raise RuntimeError(
            f"{name} was passed, but torch.distributed is not initialised in this process, or not any more. Call "
            "torch.distributed.init_process_group() first, in each process, for example under torchrun"
        )
    if mesh is not None:
        return _of_mesh(mesh, slots, wanted)
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group: this process, rank {distributed.get_rank()} of all, is no member of the group. Call this "
            "only in processes that are among the ranks that new_group was called with"
        )
    try:
        distributed.get_process_group_ranks(group)
    except (KeyError, ValueError):
        raise RuntimeError(
            "process_group has been destroyed, or belongs to a torch.distributed that has been; pass a group that was "
            "made since the last init_process_group()"
        ) from None
    return [Machines.of(group)]


def _of_mesh(mesh: Any, slots: Sequence[torch.device], wanted: tuple[str, str, int]) -> list[Machines]:
    names = mesh.mesh_dim_names or ()
    sizes = [f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True)] if names else map(str, mesh.shape)
    shown, types = f"the mesh ({', '.join(sizes)})", {slot.type for slot in slots}
    if types and mesh.device_type not in (*types, "cpu"):
        ours = ", ".join(sorted(types))
        raise ValueError(
            f"{shown} is for devices of type {mesh.device_type}, and the slots of this process are of type "
            f"{ours}; pass a mesh that init_device_mesh made for {f'{ours} or cpu' if ours != 'cpu' else 'cpu'}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{shown}: this process, rank {torch.distributed.get_rank()} of all, is not in the mesh. Call this "
            "only in processes that are"
        )
    expected, dimensions, most = wanted
    if not 1 <= mesh.ndim <= most:
        part = f"mesh[{names[0]!r}]" if names else "mesh['name'] of one whose dimensions have names"
        raise ValueError(f"{shown} has {mesh.ndim} dimensions{expected}. Pass one with {dimensions}, such as {part}")
    try:
        return [Machines.of(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    except RuntimeError as error:
        raise RuntimeError(
            f"{shown} has a dimension without a process group: {error}. Pass a mesh that init_device_mesh or "
            "DeviceMesh(...) has made with its groups"
        ) from error


class MachineMesh:
    """The groups of a fully sharded model: machines to shard over, to replicate over, or both: a row and a column.

    A machine is one process. Tensors are sharded over the slots of this machine and, if there is a *shard* group, over
    those of all its machines. The machines of the *replicate* group have the same shards. Steps have one lane over all
    machines. Gathers have another one, so that neither waits for the other.

    Attributes:
        given: the two groups that were given, ``shard`` first.
        all: the machines of both groups.
        shard, replicate: the groups over which gradients are reduce-scattered, and all-reduced afterwards.
        lane, gathers: the lanes; ``gathers`` is ``None`` if parameters are not sharded over machines.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None) -> None:
        self.given = shard, replicate
        # All ranks come here in one order: they make the same lanes.
        if shard is not None and replicate is not None:
            self.all = shard.product(replicate)
        else:
            first = shard or replicate
            assert first is not None
            self.all = first
        self.shard = None if shard is None else self.all.part(shard.ranks)
        self.replicate = None if replicate is None else self.all.part(replicate.ranks)
        self.lane = self.all.lane("steps")
        self.gathers = None if self.shard is None else self.shard.lane("gathers")
        self.peers = PeerRounds(self.all)
        self.shard_size, self.shard_rank = (1, 0) if shard is None else (shard.size, shard.rank)

    def make_communicators(self, slots: Sequence[torch.device]) -> None:
        """Makes NCCL's communicators, on all machines in one order: rows, columns, then the first device of each."""
        for machines in (self.shard, self.replicate):
            if machines is not None:
                machines.make_communicators(slots)
        self.all.make_communicators(slots[:1])

    def describe(self, slots: Sequence[torch.device]) -> dict[str, str]:
        """Describes, for `machines.start.compare`, the groups and from which devices of each the slots send."""
        groups = {"to shard over": self.shard, "to replicate over": self.replicate}
        if all(groups.values()):
            groups["in all"] = self.all
        return {
            name: f"{machines.size}, from {', '.join(machines.names_of(slots))}"
            for name, machines in groups.items()
            if machines is not None
        }

    def send_first_values(self, name: str, flats: Sequence[Tensor]) -> None:
        """Copies the values of a unit's flat shards, which are new, from the first machine that has the same shards."""
        if self.replicate is not None:
            send_values(self.replicate.words, {f"shard {i} of {name}": flat for i, flat in enumerate(flats)})
