"""`Star` and `Chain`: transports that use torch's copies. A route says who sends to whom, in pieces, in which order.

``comm.transport_choice`` chooses the route. Sums add in slot order along both, so both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from dataparallel.comm.streams.current import are_pieces_under_way, piece_streams, wavefront
from dataparallel.comm.streams.held import hold_for_peers
from dataparallel.comm.tables import summed_in
from dataparallel.comm.transport import Transport

_ALIGNED = 128
"""Pieces begin at multiples of this number of elements, where a load or store of any width may begin."""

_SQUARE_BYTES = 3 * 2**20
"""A buffer of ``n * n`` times this size has ``n`` pieces. With few pieces the last device waits long for the first one,
with many each launch counts. The sum of both is least if the number grows with the square root of the size."""

_LARGE_BYTES = 12 * 2**20
"""A large buffer has a piece for so many bytes at least: their copies take longer than their launches."""

_MOST_PIECES = 16
"""More would save less than a tenth of the time, and each piece is a launch on every device."""


class Star(Transport):
    """The first device sends to every other one, and adds what every other one sends."""

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the source into each buffer.

        A small buffer that follows others along a chain takes the chain too: otherwise it would wait for all their
        pieces, and later buffers would wait for it.
        """
        if are_pieces_under_way([flat.device for flat in (source, *buffers)]):
            Chain(pieces=1).broadcast_flat(source, buffers)
        else:
            super().broadcast_flat(source, buffers)


STAR = Star()

# On each device of a chain one stream receives a piece, adds to it and sends it on, so torch's own order of copies is
# enough. The next piece takes another stream and arrives meanwhile. The first device sends all pieces from one stream,
# since two copies at a time would only share its link.


class Chain(Transport):
    """Each device passes a buffer piece by piece to the next: in ``pieces``, by default by its size."""

    def __init__(self, pieces: int | None = None) -> None:
        self._pieces = pieces

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies ``source`` into the first buffer, from there into the second one, and so on."""
        count = self._pieces or _number_of_pieces(source)
        flats = [source, *buffers]
        pieces = [_split(flat, count) for flat in flats]
        devices = [flat.device for flat in flats]
        with piece_streams(devices, min(2, len(pieces[0]))) as streams:
            first = streams.broadcast_pieces
            streams.broadcast_pieces += len(pieces[0])
            for hop, piece in wavefront(len(buffers), len(pieces[0])):
                streams.use(devices[hop], first + piece if hop else 0)
                streams.use(devices[hop + 1], first + piece)
                pieces[hop + 1][piece].copy_(pieces[hop][piece])
        hold_for_peers(buffers, [source])

    def add_up(self, flats: Sequence[Tensor], destination: torch.device) -> Tensor:
        """The sum of ``flats`` in the order given, on ``destination``. It overwrites the buffers.

        The result goes into the first buffer that lies on the destination: its terms have been added when a piece of
        the sum arrives. Each device that receives needs memory for one buffer of partial sums.
        """
        count = self._pieces or _number_of_pieces(flats[0])
        dtype, wide = flats[0].dtype, summed_in(flats[0].dtype)
        # Consecutive buffers on one device, which adds them all before it sends the sum on.
        stations = [[*station] for _, station in groupby(flats, key=attrgetter("device"))]
        partial = [flats[0].to(wide), *(torch.empty_like(station[0], dtype=wide) for station in stations[1:])]
        # The last device rounds the sum into the memory of its last term, which has been added before.
        total = partial[-1] if wide == dtype else flats[-1]
        result = total
        if total.device != destination:
            on_destination = [flat for flat in flats if flat.device == destination]
            result = on_destination[0] if on_destination else torch.empty_like(total, device=destination)
        sums, totals, results = [_split(flat, count) for flat in partial], _split(total, count), _split(result, count)
        terms = [
            [_split(flat, count) for flat in (station if at else station[1:])] for at, station in enumerate(stations)
        ]
        devices = [*(flat.device for flat in partial), destination]
        last = len(stations) - 1
        with piece_streams(devices, min(2, len(totals))) as streams:
            for at, piece in wavefront(len(stations) + (result is not total), len(totals)):
                if at:
                    streams.use(devices[at - 1], piece if at > 1 else 0)
                # The first device sends on stream 0, so the destination, often the first, receives on the other.
                streams.use(devices[at], 1 if at > last else piece if at else 0)
                if at > last:
                    results[piece].copy_(totals[piece])
                    continue
                if at:
                    sums[at][piece].copy_(sums[at - 1][piece])
                for term in terms[at]:
                    sums[at][piece].add_(term[piece])
                if at == last and wide != dtype:
                    totals[piece].copy_(sums[at][piece])
        hold_for_peers([*partial[1:], result], partial)
        return result


def _number_of_pieces(flat: Tensor) -> int:
    nbytes = flat.numel() * flat.itemsize
    return min(_MOST_PIECES, max(1, math.isqrt(nbytes // _SQUARE_BYTES), nbytes // _LARGE_BYTES))


def _split(flat: Tensor, count: int) -> Sequence[Tensor]:
    """``count`` pieces of almost the same size, or fewer if the buffer is small."""
    size = -(-flat.numel() // (count * _ALIGNED)) * _ALIGNED
    return flat.split(size) if 0 < size < flat.numel() else (flat,)
