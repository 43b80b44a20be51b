"""torch's own copies, along a route: who sends to whom, in how many pieces, in which order.

``comm.choice`` describes the routes. All of them give the same bits: a sum along a chain runs in slot order too.
Partial sums travel from slot to slot, and each slot adds its own term.

``comm.select`` picks the route of a call. This room knows flat buffers, no buckets. On each device the work is queued
on the calling thread's current stream, and torch orders each copy against the current streams of both its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dataparallel.comm.transport import Transport, summed_in

__all__ = ["PIECES_OF_A_BROADCAST", "PIECES_OF_A_SUM", "STAR", "TorchCopies", "hops", "wavefront"]

PIECES_OF_A_BROADCAST = 3
PIECES_OF_A_SUM = 2
"""Pieces of a buffer that goes along a chain. k pieces take n - 2 + k steps, each a k-th of the time of the buffer:
more pieces would save little, and each piece is one more launch on every device."""

P = TypeVar("P")

_ALIGNED = 128
"""Elements. Pieces begin at multiples of it, where an access of any width may begin."""


@dataclass(frozen=True)
class TorchCopies(Transport):
    """torch's own copies, along a route."""

    route: str

    @property
    def flattens_single_tensors(self) -> bool:
        """A star sends a single tensor as it is: a flat buffer would only be one more copy."""
        return self.route != "star"

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """One copy for each buffer; along a chain one for each piece of each buffer."""
        is_chain = self.route == "chain" and len(buffers) > 1
        pieces = [_pieces(flat, PIECES_OF_A_BROADCAST if is_chain else 1) for flat in (source, *buffers)]
        way = hops(self.route, range(len(pieces)))
        for hop, piece in wavefront(len(way), len(pieces[0])):
            sender, receiver = way[hop]
            pieces[receiver][piece].copy_(pieces[sender][piece])

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """Along a chain, if that is the route; else the destination adds one by one."""
        if self.route == "chain":
            return _add_up_along_a_chain([*flats], destination)
        return super().add_up(flats, destination)


STAR = TorchCopies("star")


def hops(route: str, places: Sequence[P]) -> list[tuple[P, P]]:
    """Pairs of sender and receiver, in order, by which a buffer gets from the first of ``places`` to all others.

    The places are distinct. A place sends only after an earlier hop has reached it.
    """
    senders = {"star": lambda k: 0, "tree": lambda k: (k - 1) // 2, "chain": lambda k: k - 1}[route]
    return [(places[senders(k)], places[k]) for k in range(1, len(places))]


def _add_up_along_a_chain(flats: list[Tensor], destination: torch.device) -> Tensor:
    pieces = [_pieces(flat, PIECES_OF_A_SUM) for flat in flats]
    dtype, wide = flats[0].dtype, summed_in(flats[0].dtype)
    partial = [piece.to(wide) for piece in pieces[0]]
    for hop, piece in wavefront(len(flats) - 1, len(partial)):
        own = pieces[hop + 1][piece]
        partial[piece] = partial[piece].to(own.device).add_(own)
    if len(partial) == 1:
        return partial[0].to(destination).to(dtype)
    total = torch.empty_like(flats[0], dtype=wide, device=destination)
    for part, arrived in zip(_pieces(total, PIECES_OF_A_SUM), partial, strict=True):
        part.copy_(arrived)
    return total.to(dtype)


def _pieces(flat: Tensor, count: int) -> Sequence[Tensor]:
    size = -(-flat.numel() // count)
    size = -(-size // _ALIGNED) * _ALIGNED
    return flat.split(size) if 0 < size < flat.numel() else (flat,)


def wavefront(hops: int, pieces: int) -> list[tuple[int, int]]:
    """Pairs of hop and piece in the order of their launches.

    Hop by hop instead, a device in a chain would receive all pieces before its stream sends the first one on.
    """
    steps = range(hops + pieces - 1)
    return [(step - piece, piece) for step in steps for piece in range(pieces) if 0 <= step - piece < hops]
