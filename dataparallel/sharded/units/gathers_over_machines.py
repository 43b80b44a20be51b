"""Gathers of units that are sharded over machines: an owner collects its parts of all machines, and slots pull them.

All machines have to gather the same units in one order, whichever of their slots comes first. So a slot's first gather
of a unit in a call belongs with the first ones of the other slots, its second with their second: then the order is that
of any one slot, because each slot runs the same units in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.machines.collectives import all_gather, stage
from dataparallel.machines.group import Machines
from dataparallel.machines.rounds import Launched
from dataparallel.sharded.units.owned import LastCopies, OwnedShards, Source


class SourceOverMachines(Source):
    """What slots pull from: each owner's parts of all machines, one after the other. ``name``: of the unit."""

    def __init__(
        self,
        owned: OwnedShards,
        dtype: torch.dtype,
        pulls: int,
        streams: Mapping[torch.device, torch.Stream],
        copies: LastCopies,
        machines: Machines,
        name: str,
    ) -> None:
        super().__init__(owned, dtype, pulls, streams, copies)
        self._machines, self._name = machines, name
        self._launched: list[Launched] | None = None

    @property
    def is_plain(self) -> bool:
        """Never: shards of other machines have to come first."""
        return False

    def begin(self, ready: Mapping[torch.device, Event]) -> None:
        """Has the shards sent if they have not been. ``ready``: for each device an event after which they are there."""
        with self._lock:
            if self._launched is None:
                self._launched = self._launch(ready)

    def _launch(self, ready: Mapping[torch.device, Event]) -> list[Launched]:
        machines, owned = self._machines, self._owned
        for device, event in ready.items():
            event.make_wait(self._streams[device])
        try:
            with torch.no_grad(), streams_set(self._streams):
                flats = map(self._cast, owned.flats, owned.owners)
                staged = [stage(machines, flat, machines.size * flat.numel()) for flat in flats]
        finally:
            self._copies.record(self._streams)

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
        self.begin(ready)
        with self._lock:
            if self._made is None:
                assert self._launched is not None
                try:
                    with torch.no_grad(), streams_set(self._streams):
                        self._made = [
                            launched.wait().to(owner, non_blocking=True)
                            for launched, owner in zip(self._launched, self._owned.owners, strict=True)
                        ]
                finally:
                    self._ready = self._copies.record(self._streams)
            return self._made, self._ready


class SourcesOverMachines:
    """The sources of one unit in a call or a pass of backward, for each slot in its own order, under the unit's lock.

    ``make`` makes the sources of one gather, one for each dtype.
    """

    def __init__(self, slots: int, make: Callable[[], Sequence[SourceOverMachines]]) -> None:
        self._make = make
        self._gathers: list[Sequence[SourceOverMachines]] = []
        self._next = [0] * slots

    def next(self, slot: int, ready: Mapping[torch.device, Event]) -> Sequence[SourceOverMachines]:
        """The slot's next ones. They have been sent when this returns."""
        number = self._next[slot]
        self._next[slot] += 1
        if number == len(self._gathers):
            self._gathers.append(self._make())
            for source in self._gathers[number]:
                source.begin(ready)
        return self._gathers[number]
