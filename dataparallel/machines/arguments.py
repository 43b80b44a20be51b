"""`machines_of` interprets ``process_group=`` and ``mesh=``. `MachineMesh` is the machines of a fully sharded model.

Both arguments are checked before anything is sent. Errors say what was passed, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.arguments import checked
from dataparallel.machines.lanes import Machines, exists
from dataparallel.machines.peer_rounds import PeerRounds
from dataparallel.machines.start import send_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def machines_of(
    process_group: Any, mesh: DeviceMesh | None, slots: Sequence[torch.device] = (), dimensions: int = 1
) -> list[Machines]:
    """The machines of the group, or of each dimension of the mesh, which has at most so many ``dimensions``.

    A machine is a process that is a member of the group or of the mesh. The list is empty if neither is given.
    """
    if process_group is None and mesh is None:
        return []
    name, distributed = "mesh" if process_group is None else "process_group", torch.distributed
    if process_group is not None and mesh is not None:
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
    elif process_group != distributed.GroupMember.NON_GROUP_MEMBER:
        hint = ", such as torch.distributed.group.WORLD or what torch.distributed.new_group(ranks) returns"
        checked("process_group", process_group, distributed.ProcessGroup, hint=hint)
    if not distributed.is_initialized():
        raise RuntimeError(
            f"{name} was passed, but torch.distributed is not initialised in this process, or not any more. Call "
            "torch.distributed.init_process_group() first, in each process, for example under torchrun"
        )
    if mesh is not None:
        _check_mesh(mesh, slots, dimensions)
        return [Machines.of(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    if process_group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group: this process, rank {distributed.get_rank()} of all, is no member of the group. Call this "
            "only in processes that are among the ranks that new_group was called with"
        )
    if not exists(process_group):
        raise RuntimeError(
            "process_group has been destroyed, or belongs to a torch.distributed that has been; pass a group that was "
            "made since the last init_process_group()"
        )
    return [Machines.of(process_group)]


def _check_mesh(mesh: Any, slots: Sequence[torch.device], dimensions: int) -> None:
    names, types = mesh.mesh_dim_names or (), {slot.type for slot in slots}
    sizes = [f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True)] if names else map(str, mesh.shape)
    shown = f"the mesh ({', '.join(sizes)})"
    if types and mesh.device_type not in (*types, "cpu"):
        raise ValueError(
            f"{shown} is for devices of type {mesh.device_type}, and the slots of this process are of type "
            f"{', '.join(sorted(types))}; pass a mesh that init_device_mesh made for that type, or for cpu"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{shown}: this process, rank {torch.distributed.get_rank()} of all, is not in the mesh. Call this "
            "only in processes that are"
        )
    if not 1 <= mesh.ndim <= dimensions:
        wanted = "one, to replicate over" if dimensions == 1 else "one, to shard over, or two: replicate, then shard"
        part = f"mesh[{names[0]!r}]" if names else "mesh['name'] of one whose dimensions have names"
        raise ValueError(f"{shown} has {mesh.ndim} dimensions; expected {wanted}. Pass one such as {part}")


class MachineMesh:
    """The machines of a fully sharded model: to shard over, to replicate over, or both: a row and a column.

    Tensors are sharded over the slots of this machine and, if there are machines to *shard* over, over those of all of
    these. With a group parameters are sharded over the devices of each machine and replicated over machines. A mesh
    means what it means for ``torch.distributed.fsdp.fully_shard``: a single dimension shards; of two dimensions the
    first one replicates and the second one shards.

    Steps have one lane over all machines. Gathers have another one, so that neither waits for the other.

    Attributes:
        given: what was given: to shard over, and to replicate over.
        all: the machines of both.
        shard, replicate: the machines over which gradients are reduce-scattered, and all-reduced afterwards.
        lane, gathers: the lanes; ``gathers`` is ``None`` if parameters are not sharded over machines.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None, ranks: Sequence[int] = ()) -> None:
        self.given = shard, replicate
        # All ranks come here in one order: they make the same lanes.
        first = shard or replicate
        assert first is not None
        self.all = first if shard is None or replicate is None else shard.product(ranks)
        self.shard, self.replicate = (each and self.all.part(each.ranks) for each in self.given)
        self.lane = self.all.lane("steps")
        self.gathers = None if self.shard is None else self.shard.lane("gathers")
        self.peers = PeerRounds(self.all)
        self.shard_size, self.shard_rank = (1, 0) if shard is None else (shard.size, shard.rank)

    @classmethod
    def of(
        cls, process_group: ProcessGroup | None, mesh: DeviceMesh | None, slots: Sequence[torch.device]
    ) -> MachineMesh | None:
        """The machines of the arguments of `fully_shard`; ``None`` if neither is given."""
        found = machines_of(process_group, mesh, slots, 2)
        if not found:
            return None
        if mesh is None:
            return cls(None, found[0])
        return cls(found[0], None) if len(found) == 1 else cls(found[1], found[0], sorted(mesh.mesh.flatten().tolist()))

    def make_communicators(self, slots: Sequence[torch.device]) -> None:
        """Makes NCCL's communicators, on all machines in one order: rows, columns, then the first device of each."""
        for machines in (self.shard, self.replicate):
            if machines is not None:
                machines.make_communicators(slots)
        self.all.make_communicators(slots[:1])

    def describe(self, slots: Sequence[torch.device]) -> dict[str, str]:
        """Describes, for `machines.start.compare`, the groups and from which devices of each the slots send."""
        groups = {"to shard over": self.shard, "to replicate over": self.replicate, "in all": self.all}
        return {
            name: f"{machines.size}, from {', '.join(machines.names_of(slots))}"
            for name, machines in groups.items()
            if machines is not None
        }

    def send_first_values(self, name: str, flats: Sequence[Tensor]) -> None:
        """Copies the values of a unit's flat shards, which are new, from the first machine that has the same shards."""
        if self.replicate is not None:
            send_values(self.replicate.words, {f"shard {i} of {name}": flat for i, flat in enumerate(flats)})
