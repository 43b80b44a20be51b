"""`OwnedShards` packs a unit's shards into flat ones, `PullSource` lets slots pull them, on streams of `TreeStreams`.

Each shard of a parameter is a view of its owner's flat shard. `SourceOverMachines` all-gathers shards over processes.
With ``reshard_after_forward=k`` `UnitPieces` keeps parts of a unit between forward and backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel import _torch
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, current_streams, kept_stream, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.devices import CPU
from dataparallel.sharded.operators import note_host_reads
from dataparallel.sharded.placements import Shard, rows_of_shards
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import Layout, PeerTables

if TYPE_CHECKING:
    from dataparallel.machines.group import Result
    from dataparallel.machines.lanes import Lane, Machines


class TreeStreams:
    """The side streams of a tree on the devices of its slots. On the CPU there are none.

    A copy between devices orders the current streams of both: the sending one waits for the receiving one before the
    copy, which waits for the sending one after it. So an event on the receiving stream comes after all earlier pulls.

    Attributes:
        receiving: for each slot the stream on its device on which its pulls end. It owns the matrix that is received.
        pulling: for each slot the streams that are current while it pulls: the receiving one on its own device, and on
            each other owner a stream on which shards leave.
        adding: for each device the stream on which gradients arrive, are summed, and leave.
        casting: for each device the stream on which shards are cast or sent before slots pull them.
        last_casts: for each device an event after the last casts there, until `make_owners_wait`. Before it no stream
            may write to shards, and while one in pinned memory is sent, neither may the host.
    """

    def __init__(self, slots: Sequence[torch.device]) -> None:
        self.slots = list(slots)
        self.receiving = [_kept(device, "gathers", i) for i, device in enumerate(slots)]
        self.adding = self._on_each("sums")
        self.casting = self._on_each("shards are cast")
        self.last_casts: dict[torch.device, Event] = {}
        self.pulling: list[Mapping[torch.device, torch.Stream]] = []
        for slot, (device, stream) in enumerate(zip(slots, self.receiving, strict=True)):
            # Only one stream of a device can be current.
            self.pulling.append(self._on_each("shards leave", slot) | ({} if stream is None else {device: stream}))

    def _on_each(self, purpose: str, number: int = 0) -> dict[torch.device, torch.Stream]:
        return {d: stream for d in {*self.slots} if (stream := _kept(d, purpose, number)) is not None}

    def meet(self, purpose: str, events: Iterable[Event]) -> Event | None:
        """Returns one event after all ``events`` and earlier ones of the same purpose; ``None`` on the CPU."""
        stream = _kept(self.slots[0], f"{purpose} meet")
        if stream is None:
            return None
        wait_for(events, [stream])
        return Event(stream)

    def make_owners_wait(self, computing: Mapping[torch.device, torch.Stream], is_offloaded: bool) -> None:
        """Orders later writes to the shards, by these streams and by the host, after all pulls and casts of shards."""
        # Another thread may note new casts at the same time.
        casts = [event for device in self.casting if (event := self.last_casts.pop(device, None)) is not None]
        after_reads = self.meet("pulls", [*casts, *self.after_pulls()])
        wait_for([] if after_reads is None else [after_reads], computing.values())
        if is_offloaded:
            note_host_reads(casts)

    def after_pulls(self) -> list[Event]:
        """Returns an event for each slot, after all of its pulls that have been launched."""
        return [Event(stream) for stream in self.receiving if stream is not None]

    def now(self) -> dict[torch.device, Event]:
        """Returns for each device an event on its current stream."""
        return {device: Event(stream) for device, stream in current_streams(self.slots).items()}


@lru_cache
def streams_of(*slots: torch.device) -> TreeStreams:
    """Returns the streams of all trees on these slots."""
    return TreeStreams(slots)


def wait_for(events: Iterable[Event], streams: Iterable[torch.Stream]) -> None:
    streams = [*streams]
    for event in events:
        for stream in streams:
            event.make_wait(stream)


def _kept(device: torch.device, purpose: str, number: int = 0) -> torch.Stream | None:
    return None if device == CPU else kept_stream(device, purpose, number)


class OwnedShards:
    """The shards of a unit's parameters of one dtype, in one flat shard for each owner (``flats``).

    Other code may give a parameter other memory: ``load_state_dict(assign=True)``, ``model.half()``, ``to_empty``. Then
    the shards are packed again before the next call.
    ``over``: how many machines the parameters are sharded over, and the number of this machine among them.
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
        self.shapes, self.cuts = [p.shape for p in parameters], [cut_of(p) for p in parameters]
        self.layout = Layout(self.shapes, self.cuts, len(owners), machines=over[0], machine=over[1])
        self._pin = pin
        self.flats: list[Tensor] = []
        self._packed: list[tuple[Tensor, ...]] = []  # each parameter's shards as `pack` has made them
        self._addresses: list[list[int]] = []  # of these
        self._number_of_packs = 0
        self.pack()

    @property
    def are_on_meta(self) -> bool:
        return any(parameter._shards[0].is_meta for parameter in self.parameters)

    def off_host(self) -> torch.device | None:
        """Returns the device of a shard that is not in host memory; ``None`` if all shards are."""
        return next((s.device for p in self.parameters for s in p._shards if s.device != CPU), None)

    def is_stale(self) -> bool:
        """True if a parameter's shards are not the views that `pack` has made."""
        # Other code replaces all shards of a parameter at once, so most often the comparison of the tuples is enough.
        return any(
            parameter._shards is not packed and addresses != [shard.data_ptr() for shard in parameter._shards]
            for parameter, packed, addresses in zip(self.parameters, self._packed, self._addresses, strict=True)
        )

    def versions(self) -> list[int]:
        """Returns numbers that change with the values, also if these are written through ``data`` or ``shards``."""
        return [self._number_of_packs, *map(_torch.version_of, self.flats)]

    @torch.no_grad()
    def pack(self) -> None:
        """Copies the shards into new flat ones, one for each owner, and makes them views of these."""
        self.flats, self._number_of_packs = [], self._number_of_packs + 1
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


class PullSource:
    """The tensors that slots pull in one round of gathers: flat shards in the slots' dtype, on the owners' devices.

    Any thread may use it. Flat shards with this dtype and device are pulled as they are. Otherwise the first slot has
    copies made, on the casting streams, which own them, and the last of ``pulls`` slots drops the copies.
    """

    def __init__(self, owned: OwnedShards, dtype: torch.dtype, streams: TreeStreams, pulls: int) -> None:
        self._owned, self._pulls, self._dtype, self._streams = owned, pulls, dtype, streams
        self._lock = threading.Lock()
        self._copies: list[Tensor] | None = None
        self._ready: dict[torch.device, Event] = {}
        self._reads: list[Event] = []

    @property
    def is_plain(self) -> bool:
        """True if slots pull the flat shards themselves."""
        return self._dtype == self._owned.dtype and all(
            flat.device == owner for flat, owner in zip(self._owned.flats, self._owned.owners, strict=True)
        )

    def pieces(self, ready: Mapping[torch.device, Event]) -> tuple[list[Tensor], Mapping[torch.device, Event]]:
        """Returns for each owner its piece, and for each device an event after which a piece there may be read.

        Call `end_pull` after the reads, also if they fail.
        """
        if self.is_plain:
            return self._owned.flats, {}
        with self._lock:
            if self._copies is None:
                with self._copying(ready):
                    self._copies = self._copy()
            return self._copies, self._ready

    @contextmanager
    def _copying(self, ready: Mapping[torch.device, Event]) -> Iterator[None]:
        """Wraps copies: makes the casting streams current, which wait for ``ready``, and records the end."""
        casting = self._streams.casting
        for device, event in ready.items():
            event.make_wait(casting[device])
        try:
            with torch.no_grad(), streams_set(casting):
                yield
        finally:
            ends = {device: Event(stream) for device, stream in casting.items()}
            self._streams.last_casts.update(ends)
            joined = self._streams.meet("casts", ends.values())
            self._ready = {} if joined is None else dict.fromkeys(ends, joined)

    def _copy(self) -> list[Tensor]:
        # A piece is sent before it is cast: a cast on the host would hold up this thread.
        return [
            flat.to(owner, non_blocking=True).to(self._dtype)
            for flat, owner in zip(self._owned.flats, self._owned.owners, strict=True)
        ]

    def end_pull(self, readers: Sequence[Event]) -> None:
        """Ends the pull of a slot. The streams that own the copies wait for ``readers``, events after its reads."""
        with self._lock:
            self._reads += readers
            self._pulls -= 1
            if self._pulls <= 0 or self._copies is None:  # the latter if they have been dropped meanwhile
                self._let_go()

    def drop(self) -> None:
        """Drops the copies. A slot that pulls now ends as always."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        """Drops the copies, under the lock. The streams that own them wait for all reads."""
        if self._reads and self._ready and (reads := self._streams.meet("casts", self._reads)) is not None:
            wait_for([reads], self._streams.casting.values())
        self._reads, self._copies = [], None


class SourceOverMachines(PullSource):
    """The tensors that slots pull: for each owner its shards of all machines, one after the other."""

    _launched: Sequence[Result] = ()

    @property
    def is_plain(self) -> bool:
        """Always false: slots pull copies, which have the shards of other machines."""
        return False

    def send(self, unit: str, lane: Lane, epoch: int, ready: Mapping[torch.device, Event]) -> None:
        """Launches the all-gather. ``ready``: for each device an event after which its shards may be read."""
        from dataparallel.machines.collectives import stage

        machines, owned = lane.machines, self._owned
        with self._copying(ready):
            flats = [self._cast(machines, *each) for each in zip(owned.flats, owned.owners, strict=True)]
            staged = [stage(machines, flat, machines.size * flat.numel()) for flat in flats]
        self._launched = lane.launch(
            "gather",
            [f"the parameters of {unit!r} for {owner}" for owner in owned.owners],
            [shard.all_gather for shard in staged],
            f"gather\n{len(staged)} x {owned.layout.numel} {self._dtype} of {unit!r}",
            epoch=epoch,
        )

    def _cast(self, machines: Machines, flat: Tensor, owner: torch.device) -> Tensor:
        if flat.device != owner and not machines.can_send(owner):
            return flat.to(self._dtype)  # stays in host memory, and is sent from there
        return flat.to(owner, non_blocking=True).to(self._dtype)

    def pieces(self, ready: Mapping[torch.device, Event]) -> tuple[list[Tensor], Mapping[torch.device, Event]]:
        """See `PullSource.pieces`. The calling thread waits until the shards of all machines are there, or raises."""
        return super().pieces({})

    def _copy(self) -> list[Tensor]:
        return [
            launched.wait().to(owner, non_blocking=True)
            for launched, owner in zip(self._launched, self._owned.owners, strict=True)
        ]


def cut_of(parameter: ShardedTensor) -> Shard:
    """Returns the placement of a unit's parameter, which is never replicated."""
    placement = parameter.placement
    assert isinstance(placement, Shard)
    return placement


@dataclass
class Piece:
    """The piece of one slot. The computing stream that wrote it owns it, and frees it after all reads.

    Attributes:
        group: the slots whose pieces make up the unit, in the order of the pieces.
        versions: of the parameters when their values were copied.
        stream: the computing stream that owns the memory; ``None`` on the CPU.
        written: an event after the writes, on this stream.
        unread: slots of the group that have not launched their reads.
    """

    group: range
    layouts: list[Layout]
    flats: list[Tensor]
    versions: list[int]
    stream: torch.Stream | None
    written: Event | None
    unread: set[int]


class UnitPieces:
    """The pieces of one unit on all slots. Any thread may use it.

    Slots 0 to k - 1 are a group, the next k another, and so on. A slot's *piece* is the shard that it would own if the
    parameters were sharded over its group. In backward it gathers from its group if all have pieces of current values.
    A piece is freed once all slots of its group have read it, at the latest when the pass of backward ends.
    """

    def __init__(self, slots: int, indices: Sequence[Sequence[int]], owned: Sequence[OwnedShards]) -> None:
        self._indices, self._owned = indices, owned
        self._kept: list[Piece | None] = [None] * slots
        self._lock = threading.Lock()
        self._layouts: dict[int, list[Layout]] = {}

    def keep(
        self,
        slot: int,
        size: int,
        full: Sequence[Tensor],
        versions: list[int],
        stream: torch.Stream | None,
        tables: PeerTables | None,
    ) -> None:
        """Copies the slot's piece out of its ``full`` parameters, on their computing stream, which is current.

        ``tables``: by which slots will pull it.
        """
        first = slot - slot % size
        layouts = self._layouts_for(size)
        self._kept[slot] = None  # frees the last piece before memory for the next one is taken
        flats = []
        for at, (layout, indices, owned) in enumerate(zip(layouts, self._indices, self._owned, strict=True)):
            if tables is not None:
                tables.gather(slot, at, layout)  # made here: `written` comes after its copy to the device
            flat = full[indices[0]].new_empty(layout.numel)
            cuts = zip(indices, owned.cuts, strict=True)
            parts = [_part(full[i], cut.dim, slot - first, size) for i, cut in cuts]
            layout.pack(flat, parts, slot - first)
            flats.append(flat)
        written = None if stream is None else Event(stream)
        group = range(first, first + size)
        self._kept[slot] = Piece(group, layouts, flats, versions, stream, written, {*group})

    def borrow(self, slot: int, versions: list[int]) -> list[Piece] | None:
        """Returns the pieces of the slot's group, with these versions; ``None`` if one is missing.

        Call `give_back` after the reads.
        """
        with self._lock:
            own_piece = self._kept[slot]
            group = range(0) if own_piece is None else own_piece.group
            of_group = self._kept[group.start : group.stop]
            pieces = [each for each in of_group if each and each.group == group and each.versions == versions]
            return pieces if pieces and len(pieces) == len(group) else None

    def give_back(self, slot: int, pieces: Sequence[Piece], read: Event | None) -> None:
        """Notes that the slot has launched all of its reads of these pieces. ``read``: an event after them."""
        with self._lock:
            for member, piece in zip(pieces[0].group, pieces, strict=True):
                if read is not None and piece.stream is not None and not hold(piece.flats, read):
                    read.make_wait(piece.stream)
                piece.unread.discard(slot)
                if not piece.unread and self._kept[member] is piece:
                    self._kept[member] = None

    def drop(self) -> None:
        """Drops all pieces. Slots that are launching reads have references."""
        with self._lock:
            self._kept[:] = [None] * len(self._kept)

    def _layouts_for(self, size: int) -> list[Layout]:
        """Returns for each dtype the layout over ``size`` owners that fills the same full buffers as the unit's own."""
        with self._lock:
            if size not in self._layouts:
                self._layouts[size] = [
                    Layout(owned.shapes, owned.cuts, size, owned.layout.full_offsets) for owned in self._owned
                ]
            return self._layouts[size]


def _part(full: Tensor, dim: int, number: int, parts: int) -> Tensor:
    if full.dim() == 0:
        return full if number == 0 else full.new_empty(0)
    rows = rows_of_shards(full.shape[dim], parts)
    return full.detach().narrow(dim, sum(rows[:number]), rows[number])
