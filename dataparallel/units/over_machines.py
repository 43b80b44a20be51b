"""The machines that the units of a tree are spread over: which groups, how many parts, and how failures are told.

Parameters are sharded over the owners of this machine, and over those of the machines of the *shard* group too if there
is one. The machines of the *replicate* group have the same parts. There are rounds for each purpose: for the start, for
gathers, for sums over each of the two, for operators on sharded tensors, and for collectives of replicas (``peers``).
So none of them waits for another, and none meets what the user sends from another thread.

If a rank fails, every rank fails in the same step, and each says so once to each group of sums: by the end of its
round, or before one. Gathers are many, and a rank may have begun more of them than another. So a rank that has failed
fails all gathers of the others, until they have failed too.

``units.gathers_over_machines`` gathers, ``units.sums_over_machines`` adds up. The form makes `MachinesOfTree`, and
without machines nobody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.sharded.placements import Owners

if TYPE_CHECKING:
    from dataparallel.machines.group import Machines
    from dataparallel.machines.peer_rounds import PeerRounds

__all__ = ["MachinesOfTree"]


class MachinesOfTree:
    """The machines of a tree.

    Args:
        shard: over which each owner's part is sharded again.
        replicate: over which parts are replicated.

    Attributes:
        given: what was given, ``shard`` first.
        gathers: the ranks of ``shard``, for gathers.
        shard, replicate: for sums.
        parts: over how many machines parameters are sharded, and ``part``: which of them this is.
        ranks: how many machines there are in all; gradients are averaged over them.
        peers: for collectives of replicas across all of them.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None) -> None:
        self.given = shard, replicate
        # All ranks come here in one order, because making a group is collective.
        self.gathers = None if shard is None else shard.own("gathers")
        self.shard = None if shard is None else shard.own("sums")
        self.replicate = None if replicate is None else replicate.own("sums")
        self.parts, self.part = (1, 0) if shard is None else (shard.size, shard.rank)
        self.ranks = self.parts * (1 if replicate is None else replicate.size)
        self.peers = _peers(shard, replicate)

    def make_communicators(self, slots: Sequence[torch.device]) -> None:
        """Makes what NCCL needs, on all machines in one order: rows, then columns, then the first device of all."""
        for machines in (self.shard, self.replicate):
            if machines is not None:
                machines.make_communicators(slots)
        self.peers.machines.make_communicators(slots[:1])

    def is_like(self, other: MachinesOfTree | None) -> bool:
        """True if both are over the same groups."""
        return other is not None and self.given == other.given

    def owners(self, slots: Sequence[torch.device]) -> Sequence[torch.device]:
        """The owners of parameters that are sharded over these slots."""
        shard, _ = self.given
        if shard is None:
            return slots
        from dataparallel.machines.over import OverMachines

        return Owners(slots, OverMachines(shard.own("tensors")))

    def describe(self) -> str:
        """In words, for messages."""
        shard, replicate = self.given
        words = [] if shard is None else [f"sharded over {shard.size} machines"]
        words += [] if replicate is None else [f"replicated over {replicate.size} machines"]
        return " and ".join(words)

    def send_first_values(self, name: str, flats: Sequence[Tensor]) -> None:
        """Gives the flat shards of a unit, which have just got values, those of the first machine that has the same."""
        _, replicate = self.given
        if replicate is not None:
            from dataparallel.machines.start import send_values

            send_values(replicate.own("start"), {f"shard {i} of {name}": flat for i, flat in enumerate(flats)})

    def forward_failed(self, error: BaseException, was_recorded: bool) -> None:
        """Tells the others that a forward has failed here. Each of them fails in what it does next with this rank."""
        if was_recorded:
            for machines in (self.shard, self.replicate):
                if machines is not None:
                    machines.line.signal_failure(error)
        self.step_failed(error)

    def step_failed(self, error: BaseException) -> None:
        """Ends the gathers of a step that has failed here. Those of the next step begin once all ranks are here."""
        if self.gathers is not None:
            self.gathers.line.signal_failure(error, until_all=True)


def _peers(shard: Machines | None, replicate: Machines | None) -> PeerRounds:
    """The rounds of one tree, over a group that is made once for all trees of these machines."""
    from dataparallel.machines.peer_rounds import PeerRounds

    first = shard or replicate
    assert first is not None
    if shard is None or replicate is None:
        return PeerRounds(first.own("peers"))
    return PeerRounds(shard.product(replicate))
