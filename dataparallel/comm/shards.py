"""Broadcasts and sums in which each slot is in charge of one part of the buffer: its shard.

All devices send at the same time, in rounds: in round r slot i sends to slot i + r, counted modulo the number of slots.
In a round each device sends one copy and receives another. No order between the two may arise, so it sends from its
second stream and receives on the caller's (``comm.duplex``).

``comm.routes`` calls these functions, and ``comm.times`` says how long they take. Only the caller's streams are current
afterwards, and they wait for everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dataparallel.comm.chain import split
from dataparallel.comm.duplex import RECEIVING, SENDING, piece_streams
from dataparallel.comm.sent import note
from dataparallel.comm.transport import summed_in

__all__ = ["broadcast", "sum_up"]


def broadcast(source: Tensor, buffers: Sequence[Tensor]) -> None:
    """Copies one shard into each buffer; then each slot sends its shard to all others."""
    flats = [source, *buffers]
    shards = [split(flat, len(flats)) for flat in flats]
    count = len(shards[0])
    for slot in range(1, count):
        note("shards", shards[0][slot], flats[slot].device)
        shards[slot][slot].copy_(shards[0][slot])
    # The second streams wait for the shards that have arrived.
    with piece_streams([flat.device for flat in flats], min(2, count)) as streams:
        for sender, receiver in _rounds(len(flats)):
            if sender < count and receiver:
                streams.use(flats[sender].device, SENDING)
                streams.use(flats[receiver].device, RECEIVING)
                note("shards", shards[sender][sender], flats[receiver].device)
                shards[receiver][sender].copy_(shards[sender][sender])


def sum_up(flats: Sequence[Tensor], destination: torch.device) -> Tensor:
    """The sum of ``flats`` in the order given, on ``destination``. It overwrites the buffers.

    Slot j adds shard j of all slots. The sum goes into the first buffer that lies on the destination: its shards have
    been sent and added by the time their sums arrive. Each slot needs memory for the shards that it receives, less than
    one buffer.
    """
    devices = [flat.device for flat in flats]
    shards = [split(flat, len(flats)) for flat in flats]
    owners = range(len(shards[0]))
    # terms[j][i]: shard j of slot i, where slot j can read it. On one device it is read where it is.
    terms = [[shards[slot][owner] for slot in range(len(flats))] for owner in owners]
    travelling = [(i, j) for i, j in _rounds(len(flats)) if j in owners and devices[i] != devices[j]]
    for owner in owners:
        senders = [i for i, j in travelling if j == owner]
        if senders:
            received = flats[0].new_empty((len(senders), shards[0][owner].numel()), device=devices[owner])
            for sender, place in zip(senders, received.unbind(), strict=True):
                terms[owner][sender] = place
    with piece_streams(devices, min(2, len(owners))) as streams:
        for sender, owner in travelling:
            streams.use(devices[sender], SENDING)
            streams.use(devices[owner], RECEIVING)
            note("shards", shards[sender][owner], devices[owner])
            terms[owner][sender].copy_(shards[sender][owner])
    sums = [_added(of_owner) for of_owner in terms]
    there = [flat for flat in flats if flat.device == destination]
    total = there[0] if there else torch.empty_like(flats[0], device=destination)
    for place, shard in zip(split(total, len(flats)), sums, strict=True):
        if place.data_ptr() != shard.data_ptr():
            note("shards", shard, destination)
            place.copy_(shard)
    return total


def _added(terms: Sequence[Tensor]) -> Tensor:
    dtype = terms[0].dtype
    total = terms[0].to(summed_in(dtype))
    for term in terms[1:]:
        total.add_(term)
    return total.to(dtype)


def _rounds(slots: int) -> Iterator[tuple[int, int]]:
    """Pairs of sender and receiver, round after round."""
    for distance in range(1, slots):
        for slot in range(slots):
            yield slot, (slot + distance) % slots
