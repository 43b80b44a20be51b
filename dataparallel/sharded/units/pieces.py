"""`UnitPieces` keeps parts of a unit on groups of slots between forward and backward (``reshard_after_forward=k``).

Slots 0 to k - 1 are a group, the next k another, and so on. After forward a slot keeps its *piece*: the shard that it
would own if the parameters were sharded over its group. In backward a slot gathers from its group if all members have
pieces of the current values, and otherwise from the owners.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataparallel.comm.streams.current import Event, streams_set
from dataparallel.sharded.placements import rows_of_shards
from dataparallel.sharded.units.buffers import FullBuffer, Layout

if TYPE_CHECKING:
    from dataparallel.sharded.units.unit import Unit


@dataclass
class Piece:
    """The piece of one slot. The computing stream that wrote it owns it, and waits for all reads before it is freed.
    Attributes:
        group: the slots whose pieces make up the unit, in the order of the pieces.
        versions: of the parameters when their values were copied.
        stream: the computing stream that owns the memory; ``None`` on the CPU.
        written: an event after the writes, on this stream.
    """

    group: range
    layouts: list[Layout]
    flats: list[Tensor]
    versions: list[int]
    stream: torch.Stream | None
    written: Event | None
    _slots_done: set[int] = field(default_factory=set)  # slots that have launched their reads
    _reads: list[Event] = field(default_factory=list)
    _number_of_readers: int = 0  # slots that launch reads now


class UnitPieces:
    """The pieces of one unit on all slots. Any thread may use it.

    A piece is freed once all slots of its group have read it, at the latest when the pass of backward ends.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._kept: list[Piece | None] = [None] * len(unit.slots)
        self._lock = threading.Lock()
        self._layouts: dict[int, list[Layout]] = {}

    def keep(
        self, slot: int, size: int, full: Sequence[Tensor], versions: list[int], stream: torch.Stream | None
    ) -> None:
        """Copies the slot's piece out of its ``full`` parameters, on their computing stream, which is current."""
        first = slot - slot % size
        layouts = self._layouts_for(size)
        self._drop([slot])  # frees the last piece before memory for the next one is taken
        flats = []
        for layout, indices in zip(layouts, self._unit.indices, strict=True):
            flat = full[indices[0]].new_empty(layout.numel)
            parts = [_part(full[i], self._unit.cuts[i].dim, slot - first, size) for i in indices]
            layout.pack(flat, parts, slot - first)
            flats.append(flat)
        written = None if stream is None else Event(stream)
        with self._lock:
            self._kept[slot] = Piece(range(first, first + size), layouts, flats, versions, stream, written)

    def borrow(self, slot: int) -> list[Piece] | None:
        """Returns the pieces of the slot's group; ``None`` if one is missing. Call `give_back` after the reads."""
        versions = self._unit.versions()
        with self._lock:
            pieces = self._pieces_of_group(slot)
            if pieces is None or any(piece.versions != versions for piece in pieces):
                return None
            for piece in pieces:
                piece._number_of_readers += 1
            return pieces

    def _pieces_of_group(self, slot: int) -> list[Piece] | None:
        """Returns the pieces of the slot's group; ``None`` if one is missing."""
        own_piece = self._kept[slot]
        if own_piece is None:
            return None
        group = own_piece.group
        pieces = [each for each in self._kept[group.start : group.stop] if each is not None and each.group == group]
        return pieces if len(pieces) == len(group) else None

    def pull(self, slot: int, buffers: Sequence[FullBuffer]) -> bool:
        """Pulls the pieces of the slot's group into the slot's ``buffers``. Returns false if a piece is missing."""
        pieces = self.borrow(slot)
        if pieces is None:
            return False
        receiving, streams = self._unit.streams.receiving[slot], self._unit.streams.pulling[slot]
        try:
            for member, piece in zip(pieces[0].group, pieces, strict=True):
                if piece.written is not None:
                    piece.written.make_wait(streams[self._unit.slots[member]])
            with streams_set(streams):
                for at, full in enumerate(buffers):
                    full.pull([piece.flats[at] for piece in pieces], slot % len(pieces), pieces[0].layouts[at])
        finally:
            self.give_back(slot, pieces, None if receiving is None else Event(receiving))
        return True

    def give_back(self, slot: int, pieces: Sequence[Piece], read: Event | None) -> None:
        """Notes that the slot has launched all of its reads of these pieces. ``read``: an event after them."""
        finished: list[int] = []
        with self._lock:
            for piece in pieces:
                piece._number_of_readers -= 1
                piece._slots_done.add(slot)
                if read is not None:
                    piece._reads.append(read)
            for member, piece in zip(pieces[0].group, pieces, strict=True):
                if self._kept[member] is not piece:
                    _free_if_unread(piece)
                elif piece._slots_done.issuperset(piece.group):
                    finished.append(member)
        if finished:
            self._drop(finished)

    def drop(self) -> None:
        """Drops all pieces."""
        self._drop(range(len(self._kept)))

    def _layouts_for(self, size: int) -> list[Layout]:
        """Returns for each dtype the layout over ``size`` owners that fills the same full buffers as the unit's own."""
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
        with self._lock:
            for slot in slots:
                piece, self._kept[slot] = self._kept[slot], None
                if piece is not None:
                    _free_if_unread(piece)


def _free_if_unread(piece: Piece) -> None:
    """Frees a dropped piece after its reads, unless a slot launches reads now, which frees the piece later."""
    if piece._number_of_readers:
        return
    if piece.stream is not None:
        for event in piece._reads:
            event.make_wait(piece.stream)
    piece._reads.clear()
    piece.flats.clear()


def _part(full: Tensor, dim: int, number: int, parts: int) -> Tensor:
    """Returns part ``number`` of ``parts`` of a full parameter, as a view."""
    if full.dim() == 0:
        return full if number == 0 else full.new_empty(0)
    rows = rows_of_shards(full.shape[dim], parts)
    return full.detach().narrow(dim, sum(rows[:number]), rows[number])
