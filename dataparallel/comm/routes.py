"""torch's own copies, along a route: who sends to whom, in how many pieces, in which order.

``comm.times`` describes the routes. All of them give the same bits, because all of them add in slot order. Stars and
trees are here; ``comm.chain`` and ``comm.shards`` are the routes on which a device sends while it receives.

``comm.select`` picks the route of a call. This room knows flat buffers, no buckets. All work is ordered by the calling
thread's current streams: it comes after what they have been given before, and they wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dataparallel.comm import chain, shards
from dataparallel.comm.duplex import are_pieces_under_way
from dataparallel.comm.sent import note
from dataparallel.comm.transport import Transport

__all__ = ["STAR", "TorchCopies", "hops"]

P = TypeVar("P")


@dataclass(frozen=True)
class TorchCopies(Transport):
    """torch's own copies, along a route. A chain cuts each buffer into ``pieces``."""

    route: str
    pieces: int = 4

    @property
    def flattens_single_tensors(self) -> bool:
        """A star sends a single tensor as it is: a flat buffer would only be one more copy."""
        return self.route != "star"

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Along a star or a tree one copy for each buffer; along other routes one for each piece of each buffer.

        A small buffer that follows others along a chain takes that too: otherwise it would wait for all their pieces,
        and what follows would wait for it.
        """
        follows = self.route in ("star", "tree") and are_pieces_under_way([flat.device for flat in (source, *buffers)])
        if self.route == "chain" or follows:
            chain.broadcast(source, buffers, 1 if follows else self.pieces)
        elif self.route == "shards":
            shards.broadcast(source, buffers)
        else:
            for sender, receiver in hops(self.route, [source, *buffers]):
                note(self.route, sender, receiver.device)
                receiver.copy_(sender)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """Along a chain or by shards, if that is the route; else the destination adds one by one."""
        if self.route == "chain":
            return chain.sum_up([*flats], destination, self.pieces)
        if self.route == "shards":
            return shards.sum_up([*flats], destination)
        return super().add_up(flats, destination)


STAR = TorchCopies("star")


def hops(route: str, places: Sequence[P]) -> list[tuple[P, P]]:
    """Pairs of sender and receiver, in order, by which a buffer gets from the first of ``places`` to all others.

    The places are distinct, and the route is a star or a tree. A place sends only after an earlier hop has reached it.
    In a tree, the number of places that have the buffer doubles in each step: place k gets it from the place whose
    number is k without its highest bit.
    """
    senders = {"star": lambda k: 0, "tree": lambda k: k - (1 << (k.bit_length() - 1))}[route]
    return [(places[senders(k)], places[k]) for k in range(1, len(places))]
