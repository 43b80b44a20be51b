"""`MachinesOfTree` has the process groups of a tree, and `SourcesOverMachines` all-gathers shards over processes.

A machine is one process. Parameters are sharded over the owners of this machine and, if there is a *shard* group, over
the owners of all its machines. The machines of the *replicate* group have the same shards.
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
from dataparallel.sharded.units.shards import OwnedShards, PullSource

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


class MachinesOfTree:
    """The groups of a tree: machines to shard over, to replicate over, or both (a row and a column of a mesh).

    Starts, forwards and passes of backward are rounds of all machines. Gathers, operators on sharded tensors and
    collectives of replicas have queues of their own, so that none of them waits for another.

    If a rank fails, every rank fails in the same step and raises once: by the end of its round, or before one. A step
    has many gathers, and one rank may have begun more of them than another. So a rank that has failed fails all gathers
    of the others until they have failed too.

    Attributes:
        given: the two groups that were given, ``shard`` first.
        all: the machines of both groups, for rounds.
        shard, replicate: the groups over which gradients are reduce-scattered, and all-reduced afterwards.
        gathers: the ranks of ``shard``, with a queue for gathers.
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
        self.shard_size, self.shard_rank = (1, 0) if shard is None else (shard.size, shard.rank)

    @property
    def ranks(self) -> int:
        """The number of all machines. Gradients are averaged over them."""
        return self.all.size

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

    def owners(self, slots: Sequence[torch.device]) -> Sequence[torch.device]:
        """Returns the owners of parameters that are sharded over these slots."""
        return slots if self.shard is None else Owners(slots, self.shard.own("tensors"))

    def send_first_values(self, name: str, flats: Sequence[Tensor]) -> None:
        """Copies the values of a unit's flat shards, which are new, from the first machine that has the same shards."""
        if self.replicate is not None:
            send_values(self.replicate, {f"shard {i} of {name}": flat for i, flat in enumerate(flats)})

    def forward_failed(self, error: BaseException, was_recorded: bool) -> None:
        """Tells the others that a forward has failed here. Each of them fails in its next round with this rank."""
        if was_recorded:
            self.all.queue.signal_failure(error)
        self.step_failed(error)

    def step_failed(self, error: BaseException) -> None:
        """Ends the gathers of a step that has failed here. Those of the next step begin once all ranks are here."""
        if self.gathers is not None:
            self.gathers.queue.signal_failure(error, until_all=True)


class SourceOverMachines(PullSource):
    """The tensors that slots pull: for each owner its shards of all machines, one after the other."""

    def __init__(self, unit: Unit, owned: OwnedShards, pulls: int, machines: Machines) -> None:
        super().__init__(unit, owned, pulls)
        self._machines, self._name = machines, unit.name
        self._launched: list[PendingResult] | None = None

    @property
    def is_plain(self) -> bool:
        """Always false: slots pull copies, which have the shards of other machines."""
        return False

    def send(self, ready: Mapping[torch.device, Event]) -> None:
        """Launches the all-gather, once. ``ready``: for each device an event after which its shards may be read."""
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
            return flat.to(self._dtype)  # stays in host memory, and is sent from there
        return flat.to(owner, non_blocking=True).to(self._dtype)

    def pieces(self, ready: Mapping[torch.device, Event]) -> tuple[list[Tensor], Mapping[torch.device, Event]]:
        """See `PullSource.pieces`. The calling thread waits until the shards of all machines are there, or raises."""
        self.send(ready)
        return super().pieces({})

    def _copy(self) -> list[Tensor]:
        assert self._launched is not None
        return [
            launched.wait().to(owner, non_blocking=True)
            for launched, owner in zip(self._launched, self._owned.owners, strict=True)
        ]


class SourcesOverMachines:
    """The sources of one unit in one call or pass of backward. The unit's lock is held around its methods.

    All machines have to gather the same units in one order, whichever of their slots comes first. So the first gathers
    of a unit by all slots use the same sources, their second gathers the next, and so on. Then the order is that of any
    one slot, because each slot runs the same units in the same order. ``make``: makes the sources of one gather.
    """

    def __init__(self, slots: int, make: Callable[[], Sequence[SourceOverMachines]]) -> None:
        self._make = make
        self._gathers: list[Sequence[SourceOverMachines]] = []
        self._next = [0] * slots

    def next_sources(self, slot: int, ready: Mapping[torch.device, Event]) -> Sequence[SourceOverMachines]:
        """Returns the sources of the slot's next gather, whose all-gather has been launched."""
        number = self._next[slot]
        self._next[slot] += 1
        if number == len(self._gathers):
            self._gathers.append(self._make())
            for source in self._gathers[number]:
                source.send(ready)
        return self._gathers[number]
