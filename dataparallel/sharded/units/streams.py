"""The streams on which shards and gradients travel, for one tree of units. Slots compute on streams of the caller.

A copy between devices orders the two streams that are current on its ends: the source's stream waits for the target's
before it, and the target's for the source's after it. So an event on the receiving stream follows every pull before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import torch

from dataparallel.comm.streams.current import Event, current_streams, kept_stream
from dataparallel.devices import CPU

Purpose: TypeAlias = Literal["calls", "pulls", "deliveries", "sums"]
"""Who waits for events that meet: a call for the caller, owners for pulls, sums for deliveries, others for sums."""


class TreeStreams:
    """The streams of a tree on these slots, which are the owners too. On the CPU there are none.

    Attributes:
        receiving: for each slot, on its device: its pulls end there, and what it receives into is memory of it.
        adding: for each device: gradients arrive, are added, and leave there.
        casting: for each device: shards are cast or sent there before they are pulled.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = list(slots)
        self.receiving = [_kept(device, "gathers", i) for i, device in enumerate(slots)]
        self.adding = {d: s for d in {*slots} if (s := _kept(d, "sums")) is not None}
        self.casting = {d: s for d in {*slots} if (s := _kept(d, "shards are cast")) is not None}
        self.meeting = {purpose: _kept(slots[0], f"{purpose} meet") for purpose in get_args(Purpose)}
        self._pulling = self._from_all("shards leave", self.receiving)

    def pulling(self, slot: int) -> Mapping[torch.device, torch.Stream]:
        """The streams to be current while the slot pulls: sending ones on the owners, on its own device receiving."""
        return self._pulling[slot]

    def meet(self, purpose: Purpose, events: Iterable[Event]) -> Event | None:
        """One event after all of these, and after earlier ones of the same purpose: to wait for it takes one call.

        ``None`` on the CPU.
        """
        stream = self.meeting[purpose]
        if stream is None:
            return None
        wait_for(events, [stream])
        return Event(stream)

    def now(self) -> dict[torch.device, Event]:
        """An event on the current stream of each device."""
        return {device: Event(stream) for device, stream in current_streams(self.slots).items()}

    def _from_all(self, purpose: str, ends: Sequence[torch.Stream | None]) -> list[Mapping[torch.device, torch.Stream]]:
        """For each slot the streams on which its copies begin on each device, and on its own device end."""
        found: list[Mapping[torch.device, torch.Stream]] = []
        for slot, (device, own) in enumerate(zip(self.slots, ends, strict=True)):
            streams = {d: s for d in {*self.slots} if (s := _kept(d, purpose, slot)) is not None}
            if own is not None:
                streams[device] = own  # one stream of a device can be current
            found.append(streams)
        return found


def wait_for(events: Iterable[Event], streams: Iterable[torch.Stream]) -> None:
    """Makes each stream wait for each event."""
    streams = [*streams]
    for event in events:
        for stream in streams:
            event.make_wait(stream)


def _kept(device: torch.device, purpose: str, number: int = 0) -> torch.Stream | None:
    return None if device == CPU else kept_stream(device, purpose, number)
