"""What the owners hold of a unit: flat shards, the copies of them that slots pull from, and the streams of a tree.

A sharded parameter's shards are views of the owners' flat shards. A copy between devices orders the two streams that
are current on its ends: the source's waits for the target's before it, and the target's for the source's after it. So
an event on the receiving stream follows every pull before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, current_streams, kept_stream, streams_set
from dataparallel.devices import CPU
from dataparallel.profiling import note_copy
from dataparallel.sharded.placements import Shard
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import Layout

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit

Purpose: TypeAlias = Literal["calls", "pulls", "deliveries", "sums"]
"""Who waits for events that meet: a call for the caller, owners for pulls, sums for deliveries, others for sums."""


class TreeStreams:
    """The streams of a tree on these slots, which are the owners too. On the CPU there are none.

    Attributes:
        receiving: for each slot, on its device: its pulls end there, and what it receives into is memory of it.
        pulling: for each slot the streams to be current while it pulls: on its own device that one, and on the other
            owners those on which shards leave.
        adding: for each device: gradients arrive, are added, and leave there.
        casting: for each device: shards are cast or sent there before they are pulled.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = list(slots)
        self.receiving = [_kept(device, "gathers", i) for i, device in enumerate(slots)]
        self.adding = self._on_each("sums")
        self.casting = self._on_each("shards are cast")
        self.meeting = {purpose: _kept(slots[0], f"{purpose} meet") for purpose in get_args(Purpose)}
        self.pulling: list[Mapping[torch.device, torch.Stream]] = []
        for slot, (device, own) in enumerate(zip(slots, self.receiving, strict=True)):
            # One stream of a device can be current.
            self.pulling.append(self._on_each("shards leave", slot) | ({} if own is None else {device: own}))

    def _on_each(self, purpose: str, number: int = 0) -> dict[torch.device, torch.Stream]:
        return {d: stream for d in {*self.slots} if (stream := _kept(d, purpose, number)) is not None}

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


def wait_for(events: Iterable[Event], streams: Iterable[torch.Stream]) -> None:
    """Makes each stream wait for each event."""
    streams = [*streams]
    for event in events:
        for stream in streams:
            event.make_wait(stream)


def _kept(device: torch.device, purpose: str, number: int = 0) -> torch.Stream | None:
    return None if device == CPU else kept_stream(device, purpose, number)


class OwnedShards:
    """The parameters of one dtype in a unit, at their owners.

    Other code may give a parameter other memory: ``load_state_dict(assign=True)``, ``model.half()``, ``to_empty``. Then
    it is packed again before the next call.

    Args:
        parameters: sharded over the same owners. Their shards are repacked in place.
        owners: the devices that compute on the shards.
        pin: if true, shards in host memory are pinned, where an accelerator is among the owners.
        over: over how many machines the parameters are sharded, and which of them this is.

    Attributes:
        flats: for each owner its flat shard.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedTensor],
        owners: Sequence[torch.device],
        pin: bool = False,
        over: tuple[int, int] = (1, 0),
    ) -> None:
        self.parameters, self.owners = list(parameters), list(owners)
        self.dtype = parameters[0].dtype
        shapes, cuts = [p.shape for p in parameters], [cut_of(p) for p in parameters]
        self.layout = Layout(shapes, cuts, len(owners), machines=over[0], machine=over[1])
        self._pin = pin
        self.flats: list[Tensor] = []
        self._packed: list[tuple[Tensor, ...]] = []  # what each parameter's shards were
        self._addresses: list[list[int]] = []
        self.pack()

    @property
    def are_on_meta(self) -> bool:
        """True if the parameters have no memory yet."""
        return any(parameter._shards[0].is_meta for parameter in self.parameters)

    def off_host(self) -> torch.device | None:
        """The device of a shard that is not in host memory. ``None``: all are."""
        return next((s.device for p in self.parameters for s in p._shards if s.device != CPU), None)

    def is_stale(self) -> bool:
        """True if a parameter's shards are not the views that `pack` has made."""
        # Other code gives a parameter all of its shards at once: most often it is enough to see that they are the same.
        return any(
            parameter._shards is not packed and addresses != [shard.data_ptr() for shard in parameter._shards]
            for parameter, packed, addresses in zip(self.parameters, self._packed, self._addresses, strict=True)
        )

    @torch.no_grad()
    def pack(self) -> None:
        """Gives the shards memory in flat shards, one for each owner, with their values. The parameters stay the same.

        On meta there is nothing to pack.
        """
        self.flats = []
        if not self.are_on_meta:
            with torch.inference_mode(False):  # the shards outlive the block that the call may be in
                for owner in range(len(self.owners)):
                    parts = [parameter._shards[owner] for parameter in self.parameters]
                    flat = torch.zeros(self.layout.numel, dtype=self.dtype, device=parts[0].device)
                    if self._pin and flat.device == CPU and can_pin(self.owners[owner].type):
                        flat = flat.pin_memory()
                    self.layout.pack(flat, parts, owner)
                    self.flats.append(flat)
                views = [self.layout.parts_of(flat, owner) for owner, flat in enumerate(self.flats)]
            for i, parameter in enumerate(self.parameters):
                parameter._shards = tuple(of_owner[i] for of_owner in views)
        self._packed = [parameter._shards for parameter in self.parameters]
        self._addresses = [[shard.data_ptr() for shard in shards] for shards in self._packed]


class LastCopies:
    """For each device the event after the last copies that sources have made there. Units of a tree share it.

    Until then shards may not be written: while one in pinned memory is being sent, not by the host either.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[torch.device, Event] = {}

    def record(self, streams: Mapping[torch.device, torch.Stream]) -> dict[torch.device, Event]:
        """For each of the streams, on which copies have been launched, an event."""
        with self._lock:
            events = {device: Event(stream) for device, stream in streams.items()}
            self._last.update(events)
            return events

    def last(self) -> list[Event]:
        """The events after the last copies that nobody has taken."""
        with self._lock:
            return [*self._last.values()]

    def take_last(self) -> list[Event]:
        """The events after the last copies, once."""
        with self._lock:
            last, self._last = self._last, {}
            return [*last.values()]


class PullSource:
    """What the slots pull from in one round of gathers: the flat shards, cast and on their owners' devices.

    Any thread may use it. Where flat shards can be pulled as they are, it only refers to them. Else the first slot has
    the copies made, on the casting streams, whose memory they are, and the last one drops them.

    Args:
        unit: says which dtype the slots want, on which streams copies are made, and where their end is recorded.
        owned: the shards.
        pulls: how many slots will pull.
    """

    def __init__(self, unit: Unit, owned: OwnedShards, pulls: int) -> None:
        self._owned, self._pulls, self._dtype = owned, pulls, unit.dtype_on_slots(owned.dtype)
        self._streams, self._copies = unit.streams.casting, unit.binding.copies
        self._lock = threading.Lock()
        self._made: list[Tensor] | None = None
        self._ready: dict[torch.device, Event] = {}

    @property
    def is_plain(self) -> bool:
        """True if slots pull the flat shards themselves."""
        return self._dtype == self._owned.dtype and all(
            flat.device == owner for flat, owner in zip(self._owned.flats, self._owned.owners, strict=True)
        )

    @property
    def is_used_up(self) -> bool:
        """True if all slots have pulled, so that values have to be cast or sent again."""
        return self._pulls <= 0

    def pieces(self, ready: Mapping[torch.device, Event]) -> tuple[list[Tensor], Mapping[torch.device, Event]]:
        """For each owner its piece, and for each device the event after which a stream there may read it.

        ``ready``: for each device an event after which shards there may be read. Call `end_pull` after the reads, also
        where they fail.
        """
        if self.is_plain:
            return self._owned.flats, {}
        with self._lock:
            if self._made is None:
                with self._copying(ready):
                    self._made = self._copied()
            return self._made, self._ready

    @contextmanager
    def _copying(self, ready: Mapping[torch.device, Event]) -> Iterator[None]:
        """Around copies, on their streams, which wait for ``ready``."""
        for device, event in ready.items():
            event.make_wait(self._streams[device])
        try:
            with torch.no_grad(), streams_set(self._streams):
                yield
        finally:
            self._ready = self._copies.record(self._streams)

    def _copied(self) -> list[Tensor]:
        """For each owner its piece."""
        # First sent and then cast: a cast on the host would hold up this thread.
        return [
            _sent(flat, owner).to(self._dtype)
            for flat, owner in zip(self._owned.flats, self._owned.owners, strict=True)
        ]

    def end_pull(self, readers: Sequence[Event]) -> None:
        """A slot has launched its pulls, which end at ``readers``. The streams that own the copies wait for them."""
        with self._lock:
            if self._ready:  # also if `_made` was dropped meanwhile, because another slot has pulled twice
                wait_for(readers, self._streams.values())
            self._pulls -= 1
            if self._pulls <= 0:
                self._made = None


def _sent(flat: Tensor, owner: torch.device) -> Tensor:
    note_copy("direct", flat, owner)
    return flat.to(owner, non_blocking=True)


def cut_of(parameter: ShardedTensor) -> Shard:
    """The placement of a unit's parameter, which is never replicated."""
    placement = parameter.placement
    assert isinstance(placement, Shard)
    return placement
