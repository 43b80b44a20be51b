"""`OverMachines`: how tensors whose parts lie on several machines are gathered.

``sharded`` knows only the protocol ``Over`` of its own. Here is its call on a process group, a collective: all ranks
make the same calls in the same order. Each is a round, so ranks that call different operators raise, and nobody waits
for a rank that is gone. Operators have a line of their own (`Machines.another`), so that they do not wait for what
belongs to a backward. ``units`` and ``composable`` make these objects.
"""

from __future__ import annotations

from torch import Tensor

from dataparallel.machines.collectives import all_gather
from dataparallel.machines.group import Machines
from dataparallel.machines.staging import stage

__all__ = ["OverMachines"]


class OverMachines:
    """The machines over which tensors are sharded. Two are equal if they have the same group.

    Attributes:
        size: how many machines there are.
        rank: the number of this one among them.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.size, self.rank = machines.size, machines.rank

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``[size, *shape]``: the tensors of all machines, which have one shape and dtype.

        The ranks first say that they come to the same call.
        """
        flat = tensor.detach().contiguous().view(-1)
        staged = stage(self.machines, flat, self.size * flat.numel())  # here, where the current stream has computed it
        contents = f"all_gather: {flat.numel()} x {flat.dtype}"
        round = self.machines.line.begin("an operator on sharded tensors", contents)
        launched = round.launch("all_gather", lambda: all_gather(self.machines, staged))
        round.close()
        gathered: Tensor = launched.wait()
        return gathered.view(self.size, *tensor.shape)

    def describe(self) -> str:
        """In words, for messages: which machine of how many this is."""
        return f"machine {self.rank} of {self.size}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OverMachines) and other.machines.group == self.machines.group

    def __hash__(self) -> int:
        return hash((self.rank, tuple(self.machines.ranks)))
