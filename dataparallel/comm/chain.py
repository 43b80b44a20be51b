"""A chain of devices, each of which passes a buffer piece by piece to the next.

Pieces take the streams of each device in turn (``comm.duplex``). A piece stays on one stream of every device that it
passes, so torch's own order of copies is enough: it arrives, is added to, and is sent on. The next piece is on another
stream and arrives meanwhile. The first device sends all pieces from one stream, since two copies at a time would
only share its link.

``comm.routes`` calls these functions, and ``comm.times`` says how long they take. Only the caller's streams are current
afterwards, and they wait for everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dataparallel.comm.duplex import piece_streams, piece_streams_kept
from dataparallel.comm.sent import note
from dataparallel.comm.transport import summed_in

__all__ = ["broadcast", "split", "sum_up"]

_ALIGNED = 128
"""Elements. Pieces begin at multiples of it, where an access of any width may begin."""


def split(flat: Tensor, count: int) -> Sequence[Tensor]:
    """``count`` pieces of almost the same size, or fewer if the buffer is small."""
    size = -(-flat.numel() // count)
    size = -(-size // _ALIGNED) * _ALIGNED
    return flat.split(size) if 0 < size < flat.numel() else (flat,)


def broadcast(source: Tensor, buffers: Sequence[Tensor], count: int) -> None:
    """Copies ``source`` into the first buffer in ``count`` pieces, from there into the next, and so on."""
    flats = [source, *buffers]
    pieces = [split(flat, count) for flat in flats]
    devices = [flat.device for flat in flats]
    with piece_streams_kept(devices, min(2, len(pieces[0]))) as streams:
        first = streams.turn
        streams.turn += len(pieces[0])
        for hop, piece in _wavefront(len(buffers), len(pieces[0])):
            streams.use(devices[hop], first + piece if hop else 0)
            streams.use(devices[hop + 1], first + piece)
            note("chain", pieces[hop][piece], devices[hop + 1])
            pieces[hop + 1][piece].copy_(pieces[hop][piece])


def sum_up(flats: Sequence[Tensor], destination: torch.device, count: int) -> Tensor:
    """The sum of ``flats`` in the order given, on ``destination``, in ``count`` pieces. It overwrites the buffers.

    Partial sums travel from slot to slot, and each slot adds its own term. The sum goes into the first buffer that lies
    on the destination: its own term has been added by the time a piece of the sum arrives. Each device that receives
    needs memory for one buffer of partial sums.
    """
    dtype, wide = flats[0].dtype, summed_in(flats[0].dtype)
    stations = list(_stations(flats))
    partial = [flats[0].to(wide), *(torch.empty_like(station[0], dtype=wide) for station in stations[1:])]
    # The last device rounds into the memory of its last term, which has been added by then.
    total = partial[-1] if wide == dtype else flats[-1]
    result = total
    if total.device != destination:
        there = [flat for flat in flats if flat.device == destination]
        result = there[0] if there else torch.empty_like(total, device=destination)
    sums, totals, results = [split(flat, count) for flat in partial], split(total, count), split(result, count)
    terms = [[split(flat, count) for flat in (station if at else station[1:])] for at, station in enumerate(stations)]
    devices = [*(flat.device for flat in partial), destination]
    last = len(stations) - 1
    with piece_streams(devices, min(2, len(totals))) as streams:
        for at, piece in _wavefront(len(stations) + (result is not total), len(totals)):
            if at:
                streams.use(devices[at - 1], piece if at > 1 else 0)
            # The first device sends on stream 0, so the destination, which is often the first, receives on the other.
            streams.use(devices[at], 1 if at > last else piece if at else 0)
            if at > last:
                note("chain", totals[piece], destination)
                results[piece].copy_(totals[piece])
                continue
            if at:
                note("chain", sums[at - 1][piece], devices[at])
                sums[at][piece].copy_(sums[at - 1][piece])
            for term in terms[at]:
                sums[at][piece].add_(term[piece])
            if at == last and wide != dtype:
                totals[piece].copy_(sums[at][piece])
    return result


def _stations(flats: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive buffers on one device: nothing has to travel between them."""
    station = [flats[0]]
    for before, flat in pairwise(flats):
        if flat.device != before.device:
            yield station
            station = []
        station.append(flat)
    yield station


def _wavefront(hops: int, pieces: int) -> list[tuple[int, int]]:
    """Pairs of hop and piece in the order of their launches.

    Piece after piece, or hop after hop, a fast device would wait for the host: the last device gets its first piece
    only after all launches for the devices before it, or the second piece begins only when the first is launched on
    its whole way.
    """
    steps = range(hops + pieces - 1)
    return [(step - piece, piece) for step in steps for piece in range(pieces) if 0 <= step - piece < hops]
