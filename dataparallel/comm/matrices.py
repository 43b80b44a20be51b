"""`all_gather` and `reduce_scatter` of matrices with a row for each device, for ``fully_shard``. Each device has one.

If every device pulled a row from every other device, n devices would launch n * n copies, and a launch takes longer
than a copy of few bytes. These functions launch few copies for each device. A transport passes its own copy function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from dataparallel.comm.streams.current import RECEIVING, SENDING, Event, piece_streams, wavefront
from dataparallel.devices import CPU

Copy = Callable[[Tensor, Tensor], object]
"""Copies the second tensor into the first one, which has the same dtype."""

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes a tensor without values."""


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_PIECES, _CUT_ABOVE_BYTES = 4, 2**18
"""A chain cuts a matrix above this size into ``_PIECES`` pieces. As many devices, or fewer, form no chain for it."""

_OVERLAP_ABOVE_BYTES = 2**22
"""For matrices above this size each device sends and receives at the same time, on two streams."""

_NO_CHAIN_ABOVE_BYTES = 2**26
"""No number of devices forms a chain for a matrix above this size. Along a chain of 8 devices the matrix would take a
millisecond, at 225 GB/s, and the launches that the chain saves take half of that."""


def are_apart(devices: Sequence[torch.device]) -> bool:
    return len({*devices}) == len(devices) and CPU not in devices


def all_gather(copy: Copy, matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copies all ``rows`` into each of the matrices. Matrix i is on the device of row i.

    In each round a device copies all rows that another device has. So it launches about log2(n) copies, and receives
    each row once (Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
    systems", 1997).
    """
    count, number = len(rows), _streams_for(matrices[0])
    for slot, (matrix, row) in enumerate(zip(matrices, rows, strict=True)):
        copy(matrix[slot], row)
    have = 1  # how many rows each slot has: its own one and those after it, modulo ``count``
    with piece_streams([row.device for row in rows], number) as streams:
        for round in range((count - 1).bit_length()):
            # A device sends the rows of the last round from the stream on which it received them. That stream waits for
            # the other one, which received the rows before, and on which the device receives now.
            for row in rows if round > 1 else ():
                streams.order(row.device, round + 1, round)
            copied = min(have, count - have)
            for receiver in range(count) if number > 1 else _in_phases(count, have):
                sender = (receiver + have) % count
                streams.use(rows[sender].device, round)
                streams.use(rows[receiver].device, round + 1)
                end = min(sender + copied, count)
                copy(matrices[receiver][sender:end], matrices[sender][sender:end])
                if (rest := sender + copied - end) > 0:
                    copy(matrices[receiver][:rest], matrices[sender][:rest])
            have += copied


def _streams_for(matrix: Tensor) -> int:
    """The number of streams on each device that the copies of the matrix take."""
    return 2 if matrix.nbytes > _OVERLAP_ABOVE_BYTES else 1


def _in_phases(count: int, distance: int) -> Iterator[int]:
    """All slots in the order in which their copies are launched. Each slot receives from the slot ``distance`` further.

    On one stream a device cannot receive while it sends, because a copy takes the streams of both devices. If slots
    received in their order, each copy would wait for the one before. So every other slot receives first.
    """
    circles = gcd(count, distance)
    length = count // circles
    for phase in (range(0, length - 1, 2), range(1, length, 2), range(length - 1, length) if length % 2 else ()):
        for start in range(circles):
            for step in phase:
                yield (start + step * distance) % count


def reduce_scatter(
    copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Allocate = allocate, overwrite: bool = False
) -> None:
    """Adds ``matrices`` in the order given, and copies row j of the sum into ``out[j]``. See `comm.reduce_scatter`.

    Along a chain each device passes partial sums to the next one, and the last device sends each device its row: two
    launches for each device and piece. If few devices have a large matrix, sums at the owners of the rows take no more
    launches than a chain, and less time. For a very large matrix launches do not count.
    """
    devices = [matrix.device for matrix in matrices]
    if len(matrices) > 2 and are_apart(devices):
        is_square = devices == [total.device for total in out]
        if is_square and matrices[0].nbytes > (_CUT_ABOVE_BYTES if len(matrices) <= _PIECES else _NO_CHAIN_ABOVE_BYTES):
            _sum_at_owners(copy, matrices, out, empty)
        else:
            _sum_along_chain(copy, matrices, out, empty, overwrite)
        return
    for owner, total in enumerate(out):
        _add_rows(copy, [matrix[owner] for matrix in matrices], total, empty)


def _add_rows(copy: Copy, rows: Sequence[Tensor], total: Tensor, empty: Allocate) -> None:
    """Adds the rows on the device of ``total``, one after the other. One buffer receives the rows of other devices."""
    rows = [*rows]
    if len(rows) > 1 and rows[1].dtype == total.dtype and rows[0].device == total.device != rows[1].device:
        rows[:2] = rows[1], rows[0]  # the sum has the same bits, and ``total`` itself receives the row
    received: Tensor | None = None
    for at, row in enumerate(rows):
        if row.device != total.device and (at or row.dtype != total.dtype):
            received = empty(row.shape, row.dtype, total.device) if received is None else received
            copy(received, row)
            row = received
        if at:
            total.add_(row)
        elif row.device != total.device:
            copy(total, row)
        else:
            total.copy_(row)


def _sum_at_owners(copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Allocate) -> None:
    """Each device receives and adds its row from all slots, in slot order. In each step it sends to another device."""
    count, devices = len(matrices), [matrix.device for matrix in matrices]
    buffers = [empty(total.shape, matrices[0].dtype, total.device) for total in out]
    with piece_streams(devices, _streams_for(matrices[0])) as streams:
        for slot, owner in wavefront(count, count):
            row, total = matrices[slot][owner], out[owner]
            streams.use(devices[owner], RECEIVING)
            if slot != owner:
                streams.use(devices[slot], SENDING)
                received = total if slot == 0 and row.dtype == total.dtype else buffers[owner]
                copy(received, row)
                row = received
            if slot:
                total.add_(row)
            elif row is not total:
                total.copy_(row)


def _sum_along_chain(
    copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Allocate, overwrite: bool
) -> None:
    """Each device receives a partial sum, adds its own term, and sends on the result. The last device sends the rows.

    A matrix travels in pieces. While a device sends a piece of a large matrix, it receives and adds the next piece. So
    it needs memory for two sums, unless sums may overwrite its own terms. The first device adds nothing: its sums are
    its terms, if both have the same dtype.
    """
    dtype, last, devices = out[0].dtype, len(matrices) - 1, [matrix.device for matrix in matrices]
    size = -(-matrices[0].numel() // (_PIECES if matrices[0].nbytes > _CUT_ABOVE_BYTES else 1))
    terms = [matrix.view(-1).split(size) for matrix in matrices]
    count, is_wide, number = len(terms[0]), matrices[0].dtype != dtype, _streams_for(matrices[0])
    is_in_place = [not is_wide and (slot == 0 or overwrite) for slot in range(last + 1)]  # sums take the terms' memory
    counts = [(1 if slot else 0) if in_place else number for slot, in_place in enumerate(is_in_place)]
    buffers = [[empty((size,), dtype, device) for _ in range(n)] for n, device in zip(counts, devices, strict=True)]
    sums = [
        slot_terms if in_place else [slot_buffers[at % number][: len(term)] for at, term in enumerate(slot_terms)]
        for in_place, slot_buffers, slot_terms in zip(is_in_place, buffers, terms, strict=True)
    ]
    sends: list[deque[Event]] = [deque() for _ in devices]  # an event after each send from a buffer that is used again
    with piece_streams(devices, number) as streams:
        # A device sends a sum on before it receives the next piece, because the send would wait for that receive.
        for slot, piece in wavefront(last + 1, count):
            total, own = sums[slot][piece], terms[slot][piece]
            if len(sends[slot]) > 1:
                sends[slot].popleft().make_wait(streams.of_device(devices[slot])[RECEIVING])
            streams.use(devices[slot], RECEIVING)
            if slot:
                streams.use(devices[slot - 1], SENDING)
                received = buffers[slot][0][: len(own)] if is_in_place[slot] else total
                copy(received, sums[slot - 1][piece])
                total.add_(received if is_in_place[slot] else own)
            elif is_wide:
                total.copy_(own)
            if slot or is_wide:
                streams.order(devices[slot], RECEIVING, SENDING)
            if slot == last:
                streams.use(devices[last], SENDING)
                for target, part in _row_parts(out, total, piece * size):
                    if target.device != devices[last]:
                        streams.use(target.device, RECEIVING)
                    copy(target, part)
            senders = (slot - 1, slot) if slot == last else (slot - 1,)
            for sender in senders if number > 1 and slot else ():
                if not is_in_place[sender]:
                    sends[sender].append(Event(streams.of_device(devices[sender])[SENDING]))


def _row_parts(rows: Sequence[Tensor], piece: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a part of a row and the part of ``piece`` for it. The piece begins at element ``start`` of a matrix."""
    length, end = rows[0].numel(), start + len(piece)
    for at in range(start // length, -(-end // length)):
        row_start = at * length
        first, last = max(start, row_start), min(end, row_start + length)
        yield rows[at].view(-1)[first - row_start : last - row_start], piece[first - start : last - start]
