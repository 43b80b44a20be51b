"""`machines_of` interprets ``process_group=`` and ``mesh=``. `MachineMesh` is the machines of a fully sharded model.

Both arguments are checked before anything is sent. Errors say what was passed, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from dataparallel.arguments import checked
from dataparallel.machines.lanes import Lane, Machines, exists
from dataparallel.machines.peer_rounds import PeerRounds
from dataparallel.machines.start import send_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def machines_of(process_group: Any, mesh: DeviceMesh | None, dimensions: int = 1) -> list[Machines]:
    """The machines of the group, or of each dimension of the mesh, which has at most so many ``dimensions``.

    A machine is a process that is a member of the group or of the mesh. The list is empty if neither is given.
    """
    if process_group is None and mesh is None:
        return []
    if process_group is not None and mesh is not None:
        raise ValueError("pass process_group or mesh, not both: a mesh has groups of its own")
    name, is_member = "process_group", process_group != distributed.GroupMember.NON_GROUP_MEMBER
    if mesh is not None:
        from torch.distributed.device_mesh import DeviceMesh

        name, made = "mesh", "init_device_mesh('cpu', (torch.distributed.get_world_size(),))"
        checked("mesh", mesh, DeviceMesh, hint=f" over processes, as {made} returns; slots are written devices=[...]")
    elif is_member:
        hint = ", such as torch.distributed.group.WORLD or what torch.distributed.new_group(ranks) returns"
        checked("process_group", process_group, distributed.ProcessGroup, hint=hint)
    if not distributed.is_initialized() or (mesh is None and is_member and not exists(process_group)):
        raise RuntimeError(
            f"{name} was passed, but torch.distributed is not initialised in this process, or it or the group has been "
            "destroyed. Call torch.distributed.init_process_group() first, in each process, for example under "
            f"torchrun, and pass a {name} that was made since"
        )
    if not (is_member if mesh is None else mesh.get_coordinate()):
        raise ValueError(
            f"{name}: this process, rank {distributed.get_rank()} of all, is no member of it. Call this only in "
            "processes that are"
        )
    if mesh is None:
        return [Machines.of(process_group)]
    if not 1 <= mesh.ndim <= dimensions:
        wanted = "one, to replicate over" if dimensions == 1 else "one, to shard over, or two: replicate, then shard"
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions of sizes {tuple(mesh.shape)}; expected {wanted}. Pass one such as "
            f"mesh[{(mesh.mesh_dim_names or ['name'])[0]!r}], of one whose dimensions have names"
        )
    return [Machines.of(mesh.get_group(dim)) for dim in range(mesh.ndim)]


class MachineMesh:
    """The machines of a fully sharded model: to shard over, to replicate over, or both: a row and a column.

    With a group parameters are sharded over the slots of each machine and replicated over machines. A mesh means what
    it means for ``torch.distributed.fsdp.fully_shard``: a single dimension shards; of two dimensions the first one
    replicates and the second one shards.

    Attributes:
        given: what was given: to shard over, and to replicate over.
        all: the machines of both.
        shard, replicate: the machines over which gradients are reduce-scattered, and all-reduced afterwards.
        lane, gathers: the lanes of steps, and of gathers, if parameters are sharded over machines: neither waits for
            the other.
    """

    def __init__(self, process_group: ProcessGroup | None, mesh: DeviceMesh | None) -> None:
        first, *others = found = machines_of(process_group, mesh, 2)
        self.given = (None, first) if mesh is None else (found[-1], first if others else None)
        # All ranks come here in one order: they make the same lanes.
        self.all = others[0].product(sorted(mesh.mesh.flatten().tolist())) if mesh is not None and others else first
        self.shard, self.replicate = (each and self.all.part(each.ranks) for each in self.given)
        self.lane = Lane(self.all, "steps")
        self.gathers = None if self.shard is None else Lane(self.shard, "gathers")
        self.peers = PeerRounds(self.all)
        self.shard_size, self.shard_rank = (1, 0) if self.shard is None else (self.shard.size, self.shard.rank)

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
