"""The ways that flat buffers take between devices: who sends to whom, in how many pieces, in which order.

A *star* has the root send to every device, or receive from every device: n - 1 times the buffer through one link. Over
a *tree* every device sends at most twice, and after log2 n hops all have it. Along a *chain* every device sends and
receives once; pieces follow each other, so that several links are busy at a time. A sum along a chain is in slot order
too: partial sums travel from slot to slot, and each adds its own. So every route gives the same bits.

``comm`` says which route a call takes, ``copies`` takes it. This room knows tensors and devices, but no buckets. On
each device the work is queued on the calling thread's current stream, and copies order the streams of both their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from dataparallel.comm.settings import ROUTES

__all__ = [
    "PIECES_OF_A_BROADCAST",
    "PIECES_OF_A_SUM",
    "STAR",
    "TorchCopies",
    "Transport",
    "Travelling",
    "add_one_by_one",
    "hops",
    "summed_in",
]

PIECES_OF_A_BROADCAST = 3
PIECES_OF_A_SUM = 2
"""Pieces of a buffer that goes along a chain. n - 2 + k steps of a k-th of the time that the buffer takes: more pieces
would save little of what the chain's length costs, and each of them is another launch on every device."""

P = TypeVar("P")

_ALIGNED = 128
"""Elements: pieces begin where an access of any width may begin."""


Travelling: TypeAlias = "Callable[[Sequence[Tensor]], AbstractContextManager[None]]"
"""Opens the context in which flat buffers travel, and are added; it is given all that are used there."""


class Transport(Protocol):
    """What brings tensors from device to device. Memory that it returns is nobody else's, unless it says so."""

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of the tensor's data on ``device``, where it is not yet."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the data into ``target``, of the same shape, anywhere."""

    def spread(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies ``source``, which is flat, into flat ``buffers`` of its size.

        They are on other devices, and distinct ones; those of isolated slots may be anywhere.
        """

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """The sum of flat buffers in the order given, on ``destination``. They are the caller's to give away."""


@dataclass(frozen=True)
class TorchCopies:
    """torch's own copies, along a route."""

    route: str

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise ValueError(f"there is no route {self.route!r}; there are {', '.join(ROUTES)}")

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """One copy."""
        return tensor.to(device, copy=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """One copy."""
        target.copy_(source)

    def spread(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """A copy for each buffer; along a chain, for each piece and buffer."""
        is_chain = self.route == "chain" and len(buffers) > 1
        pieces = [_pieces(flat, PIECES_OF_A_BROADCAST if is_chain else 1) for flat in (source, *buffers)]
        way = hops(self.route, range(len(pieces)))
        for hop, piece in _wavefront(len(way), len(pieces[0])):
            sender, receiver = way[hop]
            pieces[receiver][piece].copy_(pieces[sender][piece])

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """Along a star, and a tree too, each buffer is asked for when the one before has been added."""
        if self.route == "chain":
            return _add_up_along_a_chain([*flats], destination)
        return add_one_by_one(flats, lambda flat: flat.to(destination))


STAR = TorchCopies("star")


def hops(route: str, places: Sequence[P]) -> list[tuple[P, P]]:
    """From which place to which a buffer is sent until all of ``places``, distinct ones, have what the first has.

    A place sends only what an earlier hop has brought.
    """
    senders = {"star": lambda k: 0, "tree": lambda k: (k - 1) // 2, "chain": lambda k: k - 1}[route]
    return [(places[senders(k)], places[k]) for k in range(1, len(places))]


def add_one_by_one(flats: Iterable[Tensor], brought: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of flat buffers, in the order given, where ``brought`` brings each; the next one only then."""
    waiting = iter(flats)
    first = next(waiting)
    total = brought(first).to(summed_in(first.dtype))
    for flat in waiting:
        total.add_(brought(flat))
    return total.to(first.dtype)


def _add_up_along_a_chain(flats: list[Tensor], destination: torch.device) -> Tensor:
    pieces = [_pieces(flat, PIECES_OF_A_SUM) for flat in flats]
    dtype, wide = flats[0].dtype, summed_in(flats[0].dtype)
    partial = [piece.to(wide) for piece in pieces[0]]
    for hop, piece in _wavefront(len(flats) - 1, len(partial)):
        own = pieces[hop + 1][piece]
        partial[piece] = partial[piece].to(own.device).add_(own)
    if len(partial) == 1:
        return partial[0].to(destination).to(dtype)
    total = torch.empty_like(flats[0], dtype=wide, device=destination)
    for part, arrived in zip(_pieces(total, PIECES_OF_A_SUM), partial, strict=True):
        part.copy_(arrived)
    return total.to(dtype)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """In what terms are added: 16-bit floats in ``float32``, which is rounded once, all others as they are."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _pieces(flat: Tensor, count: int) -> Sequence[Tensor]:
    size = -(-flat.numel() // count)
    size = -(-size // _ALIGNED) * _ALIGNED
    return flat.split(size) if 0 < size < flat.numel() else (flat,)


def _wavefront(hops: int, pieces: int) -> list[tuple[int, int]]:
    """Hops and pieces in the order in which they are launched.

    Along a chain a device's stream would else have all pieces arrive before it sends the first one on.
    """
    steps = range(hops + pieces - 1)
    return [(step - piece, piece) for step in steps for piece in range(pieces) if 0 <= step - piece < hops]
