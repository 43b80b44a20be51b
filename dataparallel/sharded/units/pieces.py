"""What the slots keep of a unit between forward and backward, so that a few neighbours have the whole of it.

With ``reshard_after_forward=k`` the slots 0 to k - 1 make a group, the next k another, and so on. After forward a slot
keeps its *piece*: the part of the parameters that it would own if they were sharded over the group. In backward a slot
gathers from its group if all members have pieces of the current values, and else from the owners.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.sharded.placements import rows_of_shards
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.buffers import FullBuffer, Layout

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


@dataclass
class Piece:
    """What one slot keeps: memory of the computing stream that wrote it, which waits for all reads before it is freed.

    Attributes:
        group: the slots that have the whole together. The position of a slot says which piece it has.
        layouts, flats: for each dtype of the unit.
        versions: of the values.
        stream: whose memory this is; ``None`` on the CPU.
        made: after the writes, on that stream.
    """

    group: range
    layouts: list[Layout]
    flats: list[Tensor]
    versions: list[int]
    stream: torch.Stream | None
    made: Event | None
    _read_by: set[int] = field(default_factory=set)
    _reads: list[Event] = field(default_factory=list)
    _readers_now: int = 0


class Pieces:
    """The pieces of one unit on all slots. Any thread may use it.

    A piece is freed once all slots of its group have read it, and at the latest when the pass ends.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._kept: list[Piece | None] = [None] * len(unit.slots)
        self._lock = threading.Lock()
        self._layouts: dict[int, list[Layout]] = {}

    def keep(
        self, slot: int, size: int, full: Sequence[Tensor], versions: list[int], stream: torch.Stream | None
    ) -> None:
        """Copies the slot's piece out of its full parameters. Their computing stream ``stream`` is current.

        ``size``: how many slots make a group. ``versions``: of the values.
        """
        first = slot - slot % size
        layouts = self._layouts_for(size)
        self._drop([slot])  # before there is memory for another one
        flats = []
        for layout, indices in zip(layouts, self._unit.indices, strict=True):
            flat = full[indices[0]].new_empty(layout.numel)
            parts = [_part(full[i], self._unit.cuts[i].dim, slot - first, size) for i in indices]
            layout.pack(flat, parts, slot - first)
            flats.append(flat)
        made = None if stream is None else Event(stream)
        with self._lock:
            self._kept[slot] = Piece(range(first, first + size), layouts, flats, versions, stream, made)

    def borrow(self, slot: int) -> list[Piece] | None:
        """The pieces of the slot's group, or ``None`` if there are not all. Give them back after the reads."""
        versions = self._unit.versions()
        with self._lock:
            found = self._group_of(slot)
            if found is None or any(piece.versions != versions for piece in found):
                return None
            for piece in found:
                piece._readers_now += 1
            return found

    def _group_of(self, slot: int) -> list[Piece] | None:
        """The pieces of the slot's group, if they are all there."""
        own = self._kept[slot]
        if own is None:
            return None
        kept = self._kept[own.group.start : own.group.stop]
        found = [piece for piece in kept if piece is not None and piece.group == own.group]
        return found if len(found) == len(own.group) else None

    def pull(self, slot: int, buffers: Sequence[FullBuffer]) -> bool:
        """Pulls the pieces of the slot's group into its buffers. Returns false if they are not all there."""
        pieces = self.borrow(slot)
        if pieces is None:
            return False
        own, streams = self._unit.streams.receiving[slot], self._unit.streams.pulling[slot]
        try:
            for member, piece in zip(pieces[0].group, pieces, strict=True):
                if piece.made is not None:
                    piece.made.make_wait(streams[self._unit.slots[member]])
            with streams_set(streams):
                for at, full in enumerate(buffers):
                    full.pull([piece.flats[at] for piece in pieces], slot % len(pieces), pieces[0].layouts[at])
        finally:
            self.give_back(slot, pieces, None if own is None else Event(own))
        return True

    def give_back(self, slot: int, pieces: Sequence[Piece], read: Event | None) -> None:
        """The slot has launched its reads of these pieces, which end at ``read``."""
        finished: list[int] = []
        with self._lock:
            for piece in pieces:
                piece._readers_now -= 1
                piece._read_by.add(slot)
                if read is not None:
                    piece._reads.append(read)
            for member, piece in zip(pieces[0].group, pieces, strict=True):
                if self._kept[member] is not piece:
                    _free_if_unread(piece)
                elif piece._read_by.issuperset(piece.group):
                    finished.append(member)
        if finished:
            self._drop(finished)

    def drop(self) -> None:
        """Drops all pieces."""
        self._drop(range(len(self._kept)))

    def drop_if_changed(self) -> None:
        """Drops all pieces if they do not have the parameters' values any more."""
        versions = self._unit.versions()
        with self._lock:
            is_old = any(piece is not None and piece.versions != versions for piece in self._kept)
        if is_old:
            self.drop()

    def as_parameters(self) -> list[nn.Parameter] | None:
        """The parameters sharded over the first group, whose memory is the pieces'. ``None`` if not all are there."""
        with self._lock:
            group = self._group_of(0)
        if group is None:
            return None
        found: dict[int, nn.Parameter] = {}
        for at, indices in enumerate(self._unit.indices):
            by_slot = [piece.layouts[at].parts_of(piece.flats[at], member) for member, piece in enumerate(group)]
            for number, i in enumerate(indices):
                parameter = self._unit.parameters[i]
                sharded = ShardedTensor(
                    [parts[number] for parts in by_slot],
                    self._unit.cuts[i],
                    parameter.shape,
                    devices=parameter.devices[: len(group)],
                )
                found[i] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        return [found[i] for i in range(len(found))]

    def _layouts_for(self, size: int) -> list[Layout]:
        """For each dtype the layout of the parameters for ``size`` owners, into full buffers as they are."""
        unit = self._unit
        with self._lock:
            if size not in self._layouts:
                self._layouts[size] = [
                    Layout(
                        [unit.shapes[i] for i in indices],
                        [unit.cuts[i] for i in indices],
                        size,
                        owned.layout.full_offsets,
                    )
                    for indices, owned in zip(unit.indices, unit.owned, strict=True)
                ]
            return self._layouts[size]

    def _drop(self, slots: Sequence[int]) -> None:
        was_shown = False
        with self._lock:
            for slot in slots:
                piece, self._kept[slot] = self._kept[slot], None
                if piece is not None:
                    was_shown = was_shown or piece.group.start == 0
                    _free_if_unread(piece)
        if was_shown:
            self._unit.registered.drop_pieces()


def _free_if_unread(piece: Piece) -> None:
    """Frees a piece that is not kept any more, in order with its reads, unless a slot is launching some now."""
    if piece._readers_now:
        return
    if piece.stream is not None:
        for event in piece._reads:
            event.make_wait(piece.stream)
    piece._reads.clear()
    piece.flats.clear()


def _part(full: Tensor, dim: int, number: int, parts: int) -> Tensor:
    """Part ``number`` of ``parts`` of a full parameter, as a view."""
    if full.dim() == 0:
        return full if number == 0 else full.new_empty(0)
    rows = rows_of_shards(full.shape[dim], parts)
    return full.detach().narrow(dim, sum(rows[:number]), rows[number])
