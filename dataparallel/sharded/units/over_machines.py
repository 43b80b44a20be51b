"""The machines that the units of a tree are spread over: their groups, and gathers of units that are sharded over them.

Parameters are sharded over the owners of this machine, and over those of the machines of the *shard* group too if there
is one. The machines of the *replicate* group have the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event
from dataparallel.machines.collectives import all_gather, stage
from dataparallel.machines.group import Machines
from dataparallel.machines.peer_rounds import PeerRounds
from dataparallel.machines.rounds import PendingResult
from dataparallel.machines.start import send_values
from dataparallel.sharded.placements import Owners
from dataparallel.sharded.units.shards import OwnedShards, Source

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


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

    def owners(self, slots: Sequence[torch.device]) -> Sequence[torch.device]:
        """The owners of parameters that are sharded over these slots."""
        return slots if self.shard is None else Owners(slots, self.shard.own("tensors"))

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


class SourceOverMachines(Source):
    """What slots pull from: each owner's parts of all machines, one after the other."""

    def __init__(self, unit: Unit, owned: OwnedShards, pulls: int, machines: Machines) -> None:
        super().__init__(unit, owned, pulls)
        self._machines, self._name = machines, unit.name
        self._launched: list[PendingResult] | None = None

    @property
    def is_plain(self) -> bool:
        """Never: shards of other machines have to come first."""
        return False

    def send(self, ready: Mapping[torch.device, Event]) -> None:
        """Has the shards sent if they have not been. ``ready``: for each device an event after which they are there."""
        with self._lock:
            if self._launched is None:
                self._launched = self._launch(ready)

    def _launch(self, ready: Mapping[torch.device, Event]) -> list[PendingResult]:
        machines, owned = self._machines, self._owned
        with self._copying(ready):
            flats = map(self._cast, owned.flats, owned.owners)
            staged = [stage(machines, flat, machines.size * flat.numel()) for flat in flats]
        round = machines.queue.begin_round(
            "gather", f"{len(staged)} x {owned.layout.numel} {self._dtype} of {self._name!r}"
        )
        launched = round.launch_together(
            [f"the parameters of {self._name!r} for {owner}" for owner in owned.owners],
            [partial(all_gather, machines, shard) for shard in staged],
        )
        round.close()
        return launched

    def _cast(self, flat: Tensor, owner: torch.device) -> Tensor:
        if flat.device != owner and not self._machines.can_send(owner):
            return flat.to(self._dtype)  # on the host, from where it is sent
        return flat.to(owner, non_blocking=True).to(self._dtype)

    def pieces(self, ready: Mapping[torch.device, Event]) -> tuple[list[Tensor], Mapping[torch.device, Event]]:
        """As of `Source`. The calling thread waits until the shards of all machines are there, or raises."""
        self.send(ready)
        return super().pieces({})

    def _copied(self) -> list[Tensor]:
        assert self._launched is not None
        return [
            launched.wait().to(owner, non_blocking=True)
            for launched, owner in zip(self._launched, self._owned.owners, strict=True)
        ]


class SourcesOverMachines:
    """The sources of one unit in a call or a pass of backward, for each slot in its own order, under the unit's lock.

    All machines have to gather the same units in one order, whichever of their slots comes first. So a slot's first
    gather of a unit belongs with the first ones of the other slots, its second with their second: then the order is
    that of any one slot, because each slot runs the same units in the same order. ``make``: the sources of one gather.
    """

    def __init__(self, slots: int, make: Callable[[], Sequence[SourceOverMachines]]) -> None:
        self._make = make
        self._gathers: list[Sequence[SourceOverMachines]] = []
        self._next = [0] * slots

    def next_sources(self, slot: int, ready: Mapping[torch.device, Event]) -> Sequence[SourceOverMachines]:
        """The slot's next ones. They have been sent when this returns."""
        number = self._next[slot]
        self._next[slot] += 1
        if number == len(self._gathers):
            self._gathers.append(self._make())
            for source in self._gathers[number]:
                source.send(ready)
        return self._gathers[number]
