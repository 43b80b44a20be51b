"""`SlotUnit` gathers the full parameters of one unit on one slot before they are used, and frees them afterwards.

The parameters are the same tensors for the whole life of the unit; only their memory comes and goes (`FullBuffer`). So
tensors that autograd saved in forward have their values again once the unit is gathered in backward.

A slot pulls from a source, and `UnitSources` says from which: `PullSource` has the shards of all owners, and with
``reshard_after_forward=k`` `SourceOfPieces` has what slots keep between forward and backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import gt
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from dataparallel import _torch, comm
from dataparallel.comm import settings
from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.streams.current import Event, current_streams, streams_set
from dataparallel.comm.streams.held import hold
from dataparallel.devices import CPU
from dataparallel.profiling import stage
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicas.stamp import layouts_of
from dataparallel.sharded.placements import rows_of_shards
from dataparallel.sharded.units.unit import (
    Layout,
    OwnedShards,
    PeerTables,
    Registries,
    ShardedUnit,
    contiguous,
    naming_out_of_memory,
    wait_for,
)
from dataparallel.weak_members import WeakMembers

if TYPE_CHECKING:
    from dataparallel.machines.group import Result
    from dataparallel.machines.lanes import Lane, Machines


class FullBuffer:
    """The full parameters of one dtype on one slot, whose storage has no bytes at first.

    Attributes:
        tensors: the parameters, views of one ``storage``. Reading them while it has no bytes crashes the process.
        buffer: all of it.
        gathered: the matrix that has arrived, in the layout of its pieces, until `fill` copies from it; or ``None``.
        nbytes: the size of the memory, while there is some.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.buffer = torch.empty(layout.owners * layout.numel, dtype=dtype, device=device)
        self.storage = self.buffer.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.tensors: list[Tensor] = []
        for columns, offset in zip(layout.columns, layout.full_offsets, strict=True):
            tensor = torch.empty(0, dtype=dtype, device=device)
            self.tensors.append(tensor.set_(self.storage, offset, columns.shape, contiguous(columns.shape)))
        self._memory = [tensor.data for tensor in self.tensors]
        self._versions: tuple[int, ...] = ()
        self._is_filled = True
        self.gathered: tuple[Tensor, Layout] | None = None
        self.free()

    def pull(self, pieces: Sequence[Tensor], first: int, layout: Layout) -> None:
        """Copies the pieces into a new matrix. Begins with piece ``first``, so that slots pull from distinct owners."""
        matrix = self.buffer.new_empty(layout.owners, layout.numel)
        rows = matrix if len(matrix) == len(pieces) else matrix.view(len(pieces), -1)  # several for a piece of machines
        order = [(first + i) % len(pieces) for i in range(len(pieces))]
        comm.copy_each([rows[i] for i in order], [pieces[i] for i in order])
        self.gathered = matrix, layout

    def pull_by(self, table: DeviceTable, pieces: Sequence[Tensor], layout: Layout) -> None:
        """Has a kernel pull the pieces straight into the buffer, which `allocate` has given memory."""
        table.launch([*pieces, self.buffer])
        layout.join_parts(self.buffer)

    def allocate(self) -> None:
        """Gives the parameters memory, unless they have some. `fill` gives them values."""
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)

    def fill(self) -> Tensor | None:
        """Completes the parameters, and returns the matrix ``gathered``, which is not kept, if they came in one."""
        self.allocate()
        if self._versions:
            _torch.set_versions(tuple(self.tensors), self._versions)
        self._is_filled = True
        if self.gathered is None:  # the values are in the buffer
            return None
        (matrix, layout), self.gathered = self.gathered, None
        layout.copy_out(matrix, self.buffer)
        return matrix

    def free(self, keeps_memory: bool = False) -> None:
        """Frees the memory, or only the values in it, and any memory that ``forward`` has given to a parameter instead.

        A backward that reads the parameters now raises, because their versions have moved.
        """
        if self._is_filled:
            if layouts_of(self.tensors) != layouts_of(self._memory):
                for tensor, memory in zip(self.tensors, self._memory, strict=True):
                    tensor.data = memory
            self._versions = tuple(map(_torch.version_of, self.tensors))
            torch.autograd.graph.increment_version(self.tensors)
        if not keeps_memory:
            self.storage.resize_(0)
        self._is_filled = False


Pieces: TypeAlias = "tuple[list[list[Tensor]], list[tuple[torch.device, Event]]]"
"""What a slot pulls: for each dtype a piece of each owner; and devices with events before reads of pieces there."""


class PullSource:
    """What slots pull in one round of gathers: flat shards in the slots' dtypes, on the owners' devices.

    Any thread may use it. Flat shards with this dtype and device are pulled as they are. Otherwise the first slot has
    copies made, on the casting streams, which own them, and the last of ``pulls`` slots drops the copies. Over machines
    such a copy has an owner's shards of all machines, one after the other: `send` launches the all-gather.

    Attributes:
        layouts: of the pieces of each dtype.
        is_under_way: machines have begun to send, and a thread that pulls waits for them.
    """

    is_under_way = False

    def __init__(self, unit: ShardedUnit, pulls: int) -> None:
        self._owned = [(owned, unit.precision.on_slots(owned.dtype)) for owned in unit.owned]
        self._owners, self._streams, self._pulls = unit.slots, unit.streams, pulls
        self.layouts = [owned.layout for owned in unit.owned]
        self.slots: set[int] = set()  # those that have pulled, or will
        self._lock = threading.Lock()
        self._copies: list[list[Tensor]] | None = None
        self._ready: dict[torch.device, Event] = {}
        self._reads: list[Event] = []
        self._launched: list[Sequence[Result]] = []

    def send(self, unit: str, lane: Lane, ready: Mapping[torch.device, Event]) -> None:
        """Launches the all-gather. ``ready``: for each device an event after which its shards may be read."""
        from dataparallel.machines.collectives import stage

        size = lane.machines.size
        with self._copying(ready):
            staged = [
                [
                    stage(lane.machines, _cast(lane.machines, flat, owner, dtype), size * flat.numel())
                    for flat, owner in zip(owned.flats, self._owners, strict=True)
                ]
                for owned, dtype in self._owned
            ]
        for (owned, dtype), shards in zip(self._owned, staged, strict=True):
            what = [f"the parameters of {unit!r} for {owner}" for owner in self._owners]
            text = f"gather\n{len(shards)} x {owned.layout.numel} {dtype} of {unit!r}"
            self._launched.append(lane.launch("gather", what, [shard.all_gather for shard in shards], text))
        self.is_under_way = True

    def pieces(self, slot: int, ready: Mapping[torch.device, Event]) -> Pieces:
        """Returns what a slot pulls. Over machines the thread waits for their shards, or raises.

        Call `end_pull` after the reads, also if they fail. ``ready``: for each device an event before reads of shards.
        """
        if not self.is_under_way and all(self._is_plain(*each) for each in self._owned):
            return [owned.flats for owned, _ in self._owned], []
        with self._lock:
            if self._copies is None:
                with self._copying({} if self.is_under_way else ready):
                    self._copies = self._copy()
            return self._copies, [*self._ready.items()]

    def _is_plain(self, owned: OwnedShards, dtype: torch.dtype) -> bool:
        """True if slots pull the flat shards themselves."""
        flats = zip(owned.flats, self._owners, strict=True)
        return dtype == owned.dtype and all(flat.device == owner for flat, owner in flats)

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
            ends = self._streams.note_casts()
            joined = self._streams.meet("casts", ends.values())
            self._ready = {} if joined is None else dict.fromkeys(ends, joined)

    def _copy(self) -> list[list[Tensor]]:
        def sent(flats: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
            # A piece is sent before it is cast: a cast on the host would hold up this thread.
            return [flat.to(o, non_blocking=True).to(dtype) for flat, o in zip(flats, self._owners, strict=True)]

        if self.is_under_way:
            found = zip(self._launched, self._owned, strict=True)
            return [sent((each.wait() for each in launched), dtype) for launched, (_, dtype) in found]
        return [
            owned.flats if self._is_plain(owned, dtype) else sent(owned.flats, dtype) for owned, dtype in self._owned
        ]

    def end_pull(self, slot: int, readers: Sequence[Event]) -> None:
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


def _cast(machines: Machines, flat: Tensor, owner: torch.device, dtype: torch.dtype) -> Tensor:
    if flat.device != owner and owner != CPU and not machines.is_nccl(owner):
        return flat.to(dtype)  # stays in host memory, and is sent from there
    return flat.to(owner, non_blocking=True).to(dtype)


class SourceOfPieces:
    """The pieces of a group of slots, which make up the parameters of a unit. Any thread may use it.

    Slots 0 to k - 1 are a group, the next k another, and so on. A slot's *piece* of a dtype is the shard that it would
    own if the parameters were sharded over its group. The computing stream that wrote a piece owns it. A piece is freed
    once all slots of the group have read it, at the latest when the pass of backward ends.

    Attributes:
        layouts: of the pieces of each dtype, in the order of the slots.
        versions: of the parameters when their values were copied.
    """

    is_under_way = False

    def __init__(self, unit: ShardedUnit, layouts: list[Layout], group: range, versions: list[int]) -> None:
        self._unit, self.layouts, self.group, self.versions = unit, layouts, group, versions
        self._lock = threading.Lock()
        # Pieces of each dtype, and an event after the writes.
        self._pieces: dict[int, tuple[list[Tensor], torch.Stream | None, Event | None]] = {}
        self._unread = {*group}  # slots that have not launched their reads
        self._reading: dict[int, list[tuple[list[Tensor], torch.Stream | None, Event | None]]] = {}  # by reader

    @property
    def is_complete(self) -> bool:
        return len(self._pieces) == len(self.group)

    def keep(self, slot: int, full: Sequence[Tensor], stream: torch.Stream | None) -> None:
        """Copies the slot's pieces out of its ``full`` parameters, on their computing stream, which is current."""
        number, flats = slot - self.group.start, []
        for owned, layout in zip(self._unit.owned, self.layouts, strict=True):
            flats.append(full[owned.positions[0]].new_empty(layout.numel))
            cuts = zip(owned.positions, owned.cuts, strict=True)
            layout.pack(flats[-1], [_part(full[i], cut.dim, number, len(self.group)) for i, cut in cuts], number)
        self._pieces[slot] = flats, stream, None if stream is None else Event(stream)

    def drop(self, slot: int) -> None:
        """Drops the slot's pieces. A slot that reads them keeps them for so long."""
        self._pieces.pop(slot, None)

    def pieces(self, slot: int, ready: Mapping[torch.device, Event]) -> Pieces:
        """See `PullSource.pieces`."""
        self._reading[slot] = kept = [self._pieces[member] for member in self.group]
        slots = zip(self.group, kept, strict=True)
        written = [(self._unit.slots[member], event) for member, (_, _, event) in slots if event is not None]
        return [[*pieces] for pieces in zip(*(flats for flats, _, _ in kept), strict=True)], written

    def end_pull(self, slot: int, readers: Sequence[Event]) -> None:
        """See `PullSource.end_pull`."""
        for flats, stream, _ in self._reading.pop(slot):
            for read in readers:
                if stream is not None and not hold(flats, read):
                    read.make_wait(stream)
        with self._lock:
            self._unread.discard(slot)
            if not self._unread:
                self._pieces.clear()
                self._unread = {*self.group}


def _part(full: Tensor, dim: int, number: int, parts: int) -> Tensor:
    if full.dim() == 0:
        return full if number == 0 else full.new_empty(0)
    rows = rows_of_shards(full.shape[dim], parts)
    return full.detach().narrow(dim, sum(rows[:number]), rows[number])


class UnitSources:
    """What the slots pull one unit from, in a call or a pass of backward. Any thread may use it."""

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        self._lock = threading.Lock()
        self._kept: dict[int, SourceOfPieces] = {}  # by slot
        self._layouts: dict[int, list[Layout]] = {}  # of the pieces of each dtype, by the size of the group
        self._rounds: list[PullSource] = []
        self._pulls = len(unit.slots)  # how many slots pull in a round
        self._lane: Lane | None = None  # of the last tree that has called the unit

    def begin(self, slots: int, lane: Lane | None) -> None:
        """Begins a call or a pass of backward on the first ``slots`` slots.

        ``lane``: that of the tree, if parameters are sharded over machines. All gathers of a tree have one order.
        """
        self._lane = lane or self._lane
        self.renew(slots)

    def source(self, slot: int, ready: Mapping[torch.device, Event]) -> PullSource | SourceOfPieces:
        """Returns what the slot's next gather pulls from. In backward these are pieces, if there are all.

        Otherwise they are the owners' shards. The first gathers of all slots have the same source, their second ones
        the next, and so on. So values are cast once for all slots, and all machines gather in one order, whichever of
        their slots comes first.
        """
        kept = self._kept.get(slot) if _torch.is_in_backward() else None
        if kept is not None and kept.is_complete and kept.versions == self._unit.versions():
            return kept
        with self._lock:
            source = next((each for each in self._rounds if slot not in each.slots), None)
            if source is None:
                source = PullSource(self._unit, self._pulls)
                if self._unit.gathers is not None:
                    source.send(self._unit.name, self._lane or self._unit.gathers, ready)
                self._rounds.append(source)
            source.slots.add(slot)
            return source

    def renew(self, pulls: int | None = None) -> None:
        """Drops all rounds, so that shards are cast or sent again for the next ``pulls`` slots, by default for all."""
        with self._lock:
            rounds, self._rounds = self._rounds, []
            self._pulls = len(self._unit.slots) if pulls is None else pulls
        for source in rounds:
            source.drop()

    def keep_pieces(
        self, slot: int, size: int, full: Sequence[Tensor], versions: list[int], stream: torch.Stream | None
    ) -> None:
        """Keeps pieces of the ``full`` parameters of a slot, whose group has ``size`` slots.

        ``stream``: the computing stream of the parameters, which is current.
        """
        unit, first = self._unit, slot - slot % size
        group = range(first, first + size)
        with self._lock:
            if size not in self._layouts:  # they fill the same full buffers as the parameters' own
                self._layouts[size] = [
                    Layout(owned.shapes, owned.cuts, size, owned.layout.full_offsets) for owned in unit.owned
                ]
            old, kept = self._kept.get(slot), [each for i in group if (each := self._kept.get(i)) is not None]
            fitting = [each for each in kept if each.group == group and each.versions == versions]
            source = fitting[0] if fitting else SourceOfPieces(unit, self._layouts[size], group, versions)
            self._kept[slot] = source
        if old is not None and old is not source:
            old.drop(slot)
        if unit.tables is not None:  # made here, so that events after the pieces come after the tables' copies
            for at, layout in enumerate(source.layouts):
                unit.tables.gather(slot, at, layout)
        source.keep(slot, full, stream)

    def drop_pieces(self) -> None:
        """Drops all pieces. Slots that read some keep them for so long."""
        self._kept.clear()

    def has_group(self, slot: int, size: int) -> bool:
        """True if the slot may keep a piece. Over machines its whole group has to take part, as all gather alike."""
        return self._unit.sharded_over[0] == 1 or slot - slot % size + size <= self._pulls


class SlotUnit:
    """The full parameters of one unit on one slot. Any thread may use it.

    A gather has two steps. `start` pulls the owners' pieces on a side stream, and may come early: by a kernel straight
    into the parameters' memory, else by copies into a matrix. `make_full` makes the computing stream wait for the
    pulls, and copies the parameters out of the matrix, if there is one. Reading a parameter without bytes crashes the
    process, so a replica's registries hold the sharded ones while the unit does not run. Memory is freed to the stream
    it belongs to: the full buffer to the computing stream, after the pull, and the matrix to the receiving stream,
    after an event at the end of the copy out.

    Attributes:
        parameters: the full ones, in the unit's order. `backward.make_outputs` gives them a node of the graph.
        is_started: a gather has started, or the parameters are full.
        is_full: the parameters have their values on the computing stream.
        is_unsharded: the user has gathered the parameters by ``unshard()``, and they have not been freed since, nor has
            a backward ended.
        is_in_backward: the backward of a call has begun and not ended.
    """

    def __init__(self, unit: ShardedUnit, sources: UnitSources, slot: int) -> None:
        self.unit, self.slot, self.device = unit, slot, unit.slots[slot]
        self._sources = sources
        self._lock = threading.RLock()
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [
                FullBuffer(owned.layout, unit.precision.on_slots(owned.dtype), self.device) for owned in unit.owned
            ]
        self.parameters: list[Tensor] = [torch.empty(0, device=self.device)] * len(unit.parameters)
        for owned, full in zip(unit.owned, self._buffers, strict=True):
            for i, tensor in zip(owned.positions, full.tensors, strict=True):
                tensor.__class__ = ReplicaParameter
                self.parameters[i] = tensor
        self.is_started = self.is_full = self.is_unsharded = False
        self._pull_event: Event | None = None  # after the pulls of a gather that `make_full` has not finished
        self._source: PullSource | SourceOfPieces | None = None  # until the slot pulls: other machines send
        self._last_stream: torch.Stream | None = None  # the computing stream that used the parameters last
        self._memory_stream: torch.Stream | None = None  # the stream that their memory belongs to
        self._versions: list[int] = []  # versions of the sharded parameters that this slot's values come from
        self._full_versions: list[int] = []  # versions of the full parameters, which our own writes do not move
        self._overwritten_position: int | None = None  # of a full parameter that other code has written to
        # References are weak, because parameters may stay full over many forwards, each with replicas of its own.
        self._showing_modules: WeakMembers[Registries] = WeakMembers()
        self._running_calls = 0  # how many calls of the unit's modules run
        # Calls whose backward has begun and not ended. With a number it ends with the unit's gradients in this pass.
        self._open_calls: dict[object, int | None] = {}
        self._has_all_gradients = False  # of the parameters, in this backward
        self.is_in_backward = False
        self._is_kept_for_graph = False  # a recorded backward has ended, and its graph may still read the parameters
        self._own_references: list[int] = []  # how many the parameters and their memory have without a graph
        self._is_as_after_backward = False  # no call has used the parameters since the last pass of backward
        self._modules_run: set[int] = set()  # numbers of the unit's modules that have run in this forward

    # ---- gathering and freeing ---------------------------------------------------------------------------------------

    def start(self, ready: Mapping[torch.device, Event]) -> None:
        """Starts a gather, unless one has started. ``ready``: for each device an event before reads of shards."""
        with self._lock:
            if self.is_started:
                return
            with stage("unshard", self.slot), torch.no_grad(), self._naming_out_of_memory():
                self._versions = self.unit.versions()
                self._source, self.is_started = self._sources.source(self.slot, ready), True
                if not self._source.is_under_way:
                    self._pull_all(ready)

    def _pull_all(self, ready: Mapping[torch.device, Event]) -> None:
        source, self._source, self.is_started = self._source, None, False  # if this raises
        assert source is not None
        receiving = self.unit.streams.receiving[self.slot]
        if receiving is not None:  # copies to it wait for it, so the streams on which shards leave need no event
            wait_for({*ready.values()}, [receiving])
        tables = self._allocate_for_kernels()
        pieces, written = source.pieces(self.slot, ready)
        try:
            for at, layout in enumerate(source.layouts):
                self._pull(tables, at, pieces[at], written, layout)
        finally:
            source.end_pull(self.slot, [] if receiving is None else [Event(receiving)])
        self._pull_event, self.is_started = None if receiving is None else Event(receiving), True

    def _allocate_for_kernels(self) -> PeerTables | None:
        """Gives the parameters memory of the current stream, which computes, if kernels pull into it.

        Graphs may keep this memory longer than the unit lives, and use it on the computing stream. Returns the tables
        of the kernels; another thread's call may end their use at any time.
        """
        receiving, tables = self.unit.streams.receiving[self.slot], self.unit.tables
        if tables is None or receiving is None:
            return None
        self._order_computing_streams()
        computing = current_streams([self.device])[self.device]
        for full in self._buffers:
            full.allocate()
        self._memory_stream = self._memory_stream or computing
        Event(computing).make_wait(receiving)  # earlier work there may still use this memory
        return tables

    def _pull(
        self,
        tables: PeerTables | None,
        at: int,
        pieces: Sequence[Tensor],
        written: Iterable[tuple[torch.device, Event]],
        layout: Layout,
    ) -> None:
        """Pulls the pieces of dtype number ``at``. ``written``: devices and events after the writes to pieces there."""
        receiving, streams = self.unit.streams.receiving[self.slot], self.unit.streams.pulling[self.slot]
        full = self._buffers[at]
        if tables is not None and receiving is not None:
            wait_for({event for _, event in written}, [receiving])  # most often one for all devices
            with streams_set({self.device: receiving}):
                full.pull_by(tables.gather(self.slot, at, layout), pieces, layout)
            return
        for device, event in written:
            event.make_wait(streams[device])
        with streams_set(streams), settings.held(self.unit.comm_settings):
            full.pull(pieces, self.slot % len(pieces), layout)

    @contextmanager
    def _naming_out_of_memory(self) -> Iterator[None]:
        """Wraps an allocation: if memory is short, frees the parameters and names the unit and the device."""
        try:
            with naming_out_of_memory("parameters", self.unit.name, self.device, self.unit.full_bytes):
                yield
        except torch.OutOfMemoryError:
            self.free()
            raise

    def make_full(self, ready: Mapping[torch.device, Event]) -> None:
        """Makes the parameters full. The current stream, which computes, waits for the gather."""
        with self._lock:
            self.start(ready)
            self._order_computing_streams()
            if not self.is_full:
                with stage("unshard", self.slot):
                    self._fill(ready)

    def _fill(self, ready: Mapping[torch.device, Event]) -> None:
        computing, receiving = current_streams([self.device]), self.unit.streams.receiving[self.slot]
        with torch.no_grad(), self._naming_out_of_memory():
            if self._source is not None:
                self._pull_all(ready)
            if self._pull_event is not None:
                wait_for([self._pull_event], computing.values())
            if self._memory_stream is None:
                self._memory_stream = self._last_stream
            for full in self._buffers:
                gathered = full.fill()
                if receiving is not None and gathered is not None:
                    wait_for([Event(stream) for stream in computing.values()], [receiving])
                    if self._pull_event is not None:
                        hold([gathered], self._pull_event)  # other devices have written to it
                del gathered  # its memory belongs to the receiving stream
        self._pull_event, self.is_started, self.is_full = None, True, True
        if not self._full_versions:
            self._full_versions, self._own_references = self._versions_of_full(), self._references()

    def use(self, ready: Mapping[torch.device, Event], module: Registries) -> None:
        """Makes the parameters full for a call of ``module``, and keeps them full until `end_use`."""
        with self._lock:
            self.make_full(ready)
            self.show_in(module)
            self._running_calls += 1
            self._is_as_after_backward = False

    def show_in(self, module: Registries) -> None:
        """Registers the parameters, which are full, in the replica of ``module`` until they are freed."""
        with self._lock:
            self._showing_modules.add(module)
            module.register(self.parameters)

    def end_use(self) -> None:
        """Ends `use`: a call of one of the unit's modules has ended."""
        with self._lock:
            self._running_calls -= 1

    def free(self) -> None:
        """Frees the parameters and drops a gather that has started, unless a call uses them."""
        with self._lock:
            if self._running_calls:
                return
            self._note_overwritten()
            used, home, keeps_memory = self._last_stream, self._memory_stream, len(self.unit.graphs) > 0
            if self.is_full and used is not None and home is not None and used != home:
                wait_for([Event(used)], [home])
            if home is not None and self._pull_event is not None:  # a kernel may be writing to it
                wait_for([self._pull_event], [home])
            for full in self._buffers:
                if full.gathered is not None and self._pull_event is not None:
                    hold([full.gathered[0]], self._pull_event)
                full.gathered = None  # its memory belongs to the receiving stream, which alone has used it
                full.free(keeps_memory)
            self._pull_event, self._source, self.is_started, self.is_full = None, None, False, False
            if not keeps_memory:
                self._memory_stream = None
            self.is_unsharded = self._is_as_after_backward = self._is_kept_for_graph = False
            for module in self._showing_modules:
                module.register(self.unit.parameters)
            self._showing_modules.clear()

    @property
    def flats(self) -> list[Tensor]:
        """For each dtype the memory of the parameters, as bytes. Writes there change no version of a parameter."""
        return [full.buffer.view(torch.uint8) for full in self._buffers]

    def copy_from(self, other: SlotUnit) -> None:
        """Copies the values of another slot, unless a gather has started. The computing streams are current."""
        with self._lock:
            if self.is_started:
                return
            self._order_computing_streams()
            with torch.no_grad(), self._naming_out_of_memory():
                for full, other_full in zip(self._buffers, other._buffers, strict=True):
                    full.allocate()
                    comm.broadcast(other_full.buffer, out=[full.buffer])
            self._versions = other._versions
            self._fill({})

    def drop_old_values(self) -> None:
        """Frees the full parameters if the sharded ones may have changed since. Counters miss some changes.

        So unchanged counters are trusted only inside the user's ``unshard()``, while a recorded graph is there, and,
        with ``reshard_after_backward=False``, from a backward to the next call. A running backward needs its values.
        """
        with self._lock:
            stays = self.is_unsharded or self._is_as_after_backward or self.is_in_backward or _torch.is_in_backward()
            stays |= self._is_kept_for_graph and self._is_read_by_graph()
            if self.is_started and not (stays and self._versions == self.unit.versions()):
                self.free()

    def unshard(self, ready: Mapping[torch.device, Event]) -> None:
        """Starts a gather for the user, as `start` does."""
        with self._lock:
            self.drop_old_values()
            self.start(ready)
            self.is_unsharded = True

    def take_overwritten(self) -> int | None:
        """Returns once the position of a full parameter that other code wrote to. All are freed: slots would differ."""
        with self._lock:
            self._note_overwritten()
            position, self._overwritten_position = self._overwritten_position, None
            if position is not None:
                self.free()
            return position

    def refuse_overwritten(self) -> None:
        """Raises if other code wrote to a full parameter. The write is lost."""
        if (position := self.take_overwritten()) is not None:
            self.unit.refuse_write(position)

    def _note_overwritten(self) -> None:
        if self.is_full and (versions := self._versions_of_full()) != self._full_versions:
            has_changed = [a != b for a, b in zip(versions, self._full_versions, strict=True)]
            self._overwritten_position, self._full_versions = has_changed.index(True), versions

    def _versions_of_full(self) -> list[int]:
        return [*map(_torch.version_of, self.parameters)]

    # ---- when to free ------------------------------------------------------------------------------------------------

    def note_module_end(self, number: int, has_backward: bool, is_announced: bool = True) -> None:
        """Frees the parameters if all of the unit's modules have run. With ``has_backward`` a graph may lead here.

        ``is_announced``: a hook on an output says when that backward begins; otherwise the parameters stay for it.
        """
        with self._lock:
            self._modules_run.add(number)
            if len(self._modules_run) < self.unit.number_of_modules:
                return
            self._modules_run.clear()
            if is_announced or not has_backward:
                self._free_after_forward(has_backward)

    def note_forward_end(self, has_failed: bool) -> None:
        """Frees what nobody needs after the forward of the whole tree."""
        with self._lock:
            was_incomplete = bool(self._modules_run)
            self._modules_run.clear()
            if self.is_in_backward:  # the forward is a recomputation
                return
            if has_failed or not self.is_full:
                self.free()  # drops a gather that was started ahead in vain
            elif was_incomplete:
                self._free_after_forward(has_backward=True)

    def _free_after_forward(self, has_backward: bool) -> None:
        unit, size = self.unit, self.unit.reshard_after_forward
        stays = size is False and (has_backward or not unit.is_reshard_automatic)
        if self.is_in_backward or self._is_kept_for_graph or stays:
            return
        if has_backward and not isinstance(size, bool):
            if not self._sources.has_group(self.slot, size):
                return
            if self.is_full and not self._running_calls:
                stream = self._last_stream
                streams = {} if stream is None else {self.device: stream}
                with self._naming_out_of_memory(), torch.no_grad(), streams_set(streams):
                    self._sources.keep_pieces(self.slot, size, self.parameters, self._versions, stream)
        self.free()

    def begin_backward(self, call: object, ends_with_gradients: bool) -> bool:
        """Notes that the backward of a call begins. Returns false if it has begun before, and the unit is full.

        It ends with `end_backward`, or if ``ends_with_gradients`` with the gradients of all parameters. Those that a
        checkpoint inside of the call brings in a pass of its own are not all.
        """
        with self._lock:
            if call in self._open_calls and self.is_full:
                return False
            self._has_all_gradients, self.is_in_backward = False, True
            self._open_calls[call] = _torch.current_graph_task_id() if ends_with_gradients else None
            return True

    def end_backward(self, call: object) -> None:
        """Notes that no node of a call is left to run, and frees the parameters if no other call needs them."""
        with self._lock:
            if call in self._open_calls:
                del self._open_calls[call]
                self._free_after_backward()

    def note_gradients(self) -> None:
        """Notes that all parameters have their gradients in this pass, and frees them if no node needs them."""
        with self._lock:
            task = _torch.current_graph_task_id()
            self._open_calls = {call: ends_in for call, ends_in in self._open_calls.items() if ends_in != task}
            self._has_all_gradients = True
            self._free_after_backward()

    def _free_after_backward(self) -> None:
        # With create_graph=True another backward may follow through this one's graph, whose nodes read the parameters.
        if self._is_kept_for_graph or torch.is_grad_enabled():
            return
        if not self._open_calls and (self._has_all_gradients or not self.unit.trainable):
            self.is_in_backward = False
            if self.unit.reshard_after_backward:
                self.free()

    def note_pass_end(self, has_failed: bool, was_recorded: bool) -> None:
        """Frees the parameters after a pass of backward, unless a pass through its recorded graph may follow."""
        with self._lock:
            self._open_calls.clear()
            self.is_in_backward, self._is_as_after_backward = False, True
            self.is_unsharded = False  # the gradients are those of the sharded parameters
            may_be_read = (was_recorded or self._is_kept_for_graph) and not has_failed
            self._is_kept_for_graph = may_be_read and self._is_read_by_graph()
            if self._is_kept_for_graph:
                return
            if has_failed or self.unit.reshard_after_backward:
                self.free()

    def _is_read_by_graph(self) -> bool:
        """True if a graph has saved a parameter, or a view of one."""
        return any(map(gt, self._references(), self._own_references))

    def _references(self) -> list[int]:
        return [*map(_torch.use_count, self.parameters), *(_torch.tensors_on(full.storage) for full in self._buffers)]

    def _order_computing_streams(self) -> None:
        """Makes the current stream wait for the computing stream that used the parameters last, if it is another."""
        current = current_streams([self.device]).get(self.device)
        if self._last_stream is not None and current is not None and current != self._last_stream:
            Event(self._last_stream).make_wait(current)
        self._last_stream = current
