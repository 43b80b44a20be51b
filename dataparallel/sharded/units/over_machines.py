"""The machines that the units of a tree are spread over: which groups, how many parts, and how failures are told.

Parameters are sharded over the owners of this machine, and over those of the machines of the *shard* group too if there
is one. The machines of the *replicate* group have the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel.machines.group import Machines
from dataparallel.machines.peer_rounds import PeerRounds
from dataparallel.machines.start import send_values
from dataparallel.sharded.placements import Owners


class MachinesOfTree:
    """The machines of a tree: those given to shard over, to replicate over, or both: a row and a column of a mesh.

    Starts, forwards and passes of backward are rounds of all machines. Gathers, operators on sharded tensors and
    collectives of replicas have queues of their own: so none of them waits for another.

    If a rank fails, every rank fails in the same step, and each says so once: by the end of its round, or before one.
    Gathers are many, and a rank may have begun more of them than another. So a rank that has failed fails all gathers
    of the others, until they have failed too.

    Attributes:
        given: what was given, ``shard`` first.
        all: the machines of both, for rounds.
        shard, replicate: the groups over which sums are scattered, and over which they are the same afterwards.
        gathers: the ranks of ``shard``, for gathers.
        parts: over how many machines parameters are sharded, and ``part``: which of them this is.
        peers: for collectives of replicas across all of them.
    """

    def __init__(self, shard: Machines | None, replicate: Machines | None) -> None:
        self.given = shard, replicate
        # All ranks come here in one order, because making a group is collective.
        if shard is not None and replicate is not None:
            self.all = shard.product(replicate)
            self.shard: Machines | None = self.all.part(shard.ranks)
            self.replicate: Machines | None = self.all.part(replicate.ranks)
        else:
            first = shard or replicate
            assert first is not None
            self.all = first.own("rounds")
            self.shard, self.replicate = shard and self.all, replicate and self.all
        self.gathers = None if self.shard is None else self.shard.own("gathers")
        self.peers = PeerRounds(self.all.own("peers"))
        self.parts, self.part = (1, 0) if shard is None else (shard.size, shard.rank)

    @property
    def ranks(self) -> int:
        """How many machines there are in all; gradients are averaged over them."""
        return self.all.size

    def make_communicators(self, slots: Sequence[torch.device]) -> None:
        """Makes what NCCL needs, on all machines in one order: rows, then columns, then the first device of all."""
        for machines in (self.shard, self.replicate):
            if machines is not None:
                machines.make_communicators(slots)
        self.all.make_communicators(slots[:1])

    def is_like(self, other: MachinesOfTree | None) -> bool:
        """True if both are over the same groups."""
        return other is not None and self.given == other.given

    def owners(self, slots: Sequence[torch.device]) -> Sequence[torch.device]:
        """The owners of parameters that are sharded over these slots."""
        return slots if self.shard is None else Owners(slots, self.shard.own("tensors"))

    def describe(self) -> str:
        """In words, for messages."""
        shard, replicate = self.given
        words = [] if shard is None else [f"sharded over {shard.size} machines"]
        words += [] if replicate is None else [f"replicated over {replicate.size} machines"]
        return " and ".join(words)

    def send_first_values(self, name: str, flats: Sequence[Tensor]) -> None:
        """Gives the flat shards of a unit, which have just got values, those of the first machine that has the same."""
        if self.replicate is not None:
            send_values(self.replicate, {f"shard {i} of {name}": flat for i, flat in enumerate(flats)})

    def forward_failed(self, error: BaseException, was_recorded: bool) -> None:
        """Tells the others that a forward has failed here. Each of them fails in what it does next with this rank."""
        if was_recorded:
            self.all.queue.signal_failure(error)
        self.step_failed(error)

    def step_failed(self, error: BaseException) -> None:
        """Ends the gathers of a step that has failed here. Those of the next step begin once all ranks are here."""
        if self.gathers is not None:
            self.gathers.queue.signal_failure(error, until_all=True)
