"""Collectives of matrices that have a row for each device: ``fully_shard`` gathers parameters and adds up gradients.

If each device pulled a row from each other one, n devices would launch n * n copies, and launches take longer than the
copies of few bytes. Here the copies of a device are few. A transport calls these functions with its own copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from dataparallel.comm.duplex import RECEIVING, SENDING, piece_streams
from dataparallel.comm.streams.current import Event
from dataparallel.devices import CPU

Copy = Callable[[Tensor, Tensor], object]
"""Copies into the first tensor what the second one has. Dtypes are the same."""

Memory = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes a tensor without values."""


def memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`Memory` of torch's."""
    return torch.empty(shape, dtype=dtype, device=device)


_PIECES, _IN_PIECES_FROM = 4, 2**18
"""Along a chain a matrix of more bytes than this travels in so many pieces. Up to so many devices form no chain for
it."""

_LARGE = 2**22
"""Bytes. Devices send and receive parts of matrices of more bytes than this at the same time."""

_VERY_LARGE = 2**26
"""Bytes. The rows of a larger matrix go straight to their owners. Along a chain of 8 devices it takes a millisecond, at
225 GB/s, and the launches that a chain saves take half of that."""


def are_apart(devices: Sequence[torch.device]) -> bool:
    """True for distinct accelerators."""
    return len({*devices}) == len(devices) and CPU not in devices


def all_gather(copy: Copy, matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copies all ``rows`` into each of the matrices. The matrix at a position is where the row at it is.

    In each round a device copies all rows that another one has: about log2(n) copies on each device, which receives
    each row once (Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
    systems", 1997).
    """
    count, number = len(rows), _streams_for(matrices[0])
    for slot, (matrix, row) in enumerate(zip(matrices, rows, strict=True)):
        copy(matrix[slot], row)
    have = 1  # each slot has so many rows, from its own one on; the first row comes after the last one
    with piece_streams([row.device for row in rows], number) as streams:
        for round in range((count - 1).bit_length()):
            # What a device has received in the round before is sent from the stream that it came on. The other stream,
            # on which it receives now, has what came before that.
            for row in rows if round > 1 else ():
                streams.order(row.device, round + 1, round)
            more = min(have, count - have)
            for receiver in range(count) if number > 1 else _in_phases(count, have):
                sender = (receiver + have) % count
                streams.use(rows[sender].device, round)
                streams.use(rows[receiver].device, round + 1)
                until = min(sender + more, count)
                copy(matrices[receiver][sender:until], matrices[sender][sender:until])
                if (rest := sender + more - until) > 0:
                    copy(matrices[receiver][:rest], matrices[sender][:rest])
            have += more


def _streams_for(matrix: Tensor) -> int:
    """How many streams of each device its copies take."""
    return 2 if matrix.nbytes > _LARGE else 1


def _in_phases(count: int, distance: int) -> Iterator[int]:
    """All slots, each of which is to receive from the one at this ``distance``, in the order of the launches.

    On one stream a device that sends cannot receive meanwhile, because a copy takes the streams of both ends. So first
    every other slot receives, and then the rest: one after the other, each copy would wait for the one before.
    """
    circles = gcd(count, distance)
    length = count // circles
    for phase in (range(0, length - 1, 2), range(1, length, 2), range(length - 1, length) if length % 2 else ()):
        for start in range(circles):
            for step in phase:
                yield (start + step * distance) % count


def reduce_scatter(
    copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Memory = memory, overwrite: bool = False
) -> None:
    """Copies row j of the sum of ``matrices``, which is added in the order given, into ``out[j]``.

    Partial sums pass from each device to the next, and the last one sends each device its row: two launches for each
    device and piece. A large matrix on few devices takes no more launches if each device gets its row from each other
    one, and less time. For a very large one the launches do not count. See `comm.reduce_scatter`.
    """
    devices = [matrix.device for matrix in matrices]
    if len(matrices) > 2 and are_apart(devices):
        is_square = devices == [total.device for total in out]
        if is_square and matrices[0].nbytes > (_IN_PIECES_FROM if len(matrices) <= _PIECES else _VERY_LARGE):
            _from_each(copy, matrices, out, empty)
        else:
            _along_a_chain(copy, matrices, out, empty, overwrite)
        return
    for owner, total in enumerate(out):
        _add_rows(copy, [matrix[owner] for matrix in matrices], total, empty)


def _add_rows(copy: Copy, rows: Sequence[Tensor], total: Tensor, empty: Memory) -> None:
    """Adds the rows where ``total`` is, one after the other. Rows that travel are there one at a time."""
    rows = [*rows]
    if len(rows) > 1 and rows[1].dtype == total.dtype and rows[0].device == total.device != rows[1].device:
        rows[:2] = rows[1], rows[0]  # their sum has the same bits, and what travels needs no memory of its own
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


def _from_each(copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Memory) -> None:
    """Each device gets its row from one device after the other, in slot order. In each step it sends to another one."""
    count, devices = len(matrices), [matrix.device for matrix in matrices]
    rooms = [empty(total.shape, matrices[0].dtype, total.device) for total in out]
    with piece_streams(devices, _streams_for(matrices[0])) as streams:
        for step in range(2 * count - 1):
            for owner in range(max(step - count + 1, 0), min(step + 1, count)):
                slot = step - owner
                row, total = matrices[slot][owner], out[owner]
                streams.use(devices[owner], RECEIVING)
                if slot != owner:
                    streams.use(devices[slot], SENDING)
                    received = total if slot == 0 and row.dtype == total.dtype else rooms[owner]
                    copy(received, row)
                    row = received
                if slot:
                    total.add_(row)
                elif row is not total:
                    total.copy_(row)


def _along_a_chain(
    copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Memory, overwrite: bool
) -> None:
    """Each device adds its own terms to what it receives, and sends on the sum. The last one sends it to the rows.

    A matrix travels in pieces. A device receives and adds a piece of a large one while it sends the piece before, so it
    needs memory for two sums, unless they may take the place of its own terms. The first device sends its terms as they
    are, if they have the dtype of the sums.
    """
    dtype, last, devices = out[0].dtype, len(matrices) - 1, [matrix.device for matrix in matrices]
    size = -(-matrices[0].numel() // (_PIECES if matrices[0].nbytes > _IN_PIECES_FROM else 1))
    terms = [matrix.view(-1).split(size) for matrix in matrices]
    count, is_wide, number = len(terms[0]), matrices[0].dtype != dtype, _streams_for(matrices[0])
    is_own = [not is_wide and (slot == 0 or overwrite) for slot in range(last + 1)]  # where sums are
    needs = [0 if own and slot == 0 else 1 if own else number for slot, own in enumerate(is_own)]
    rooms = [[empty((size,), dtype, device) for _ in range(n)] for n, device in zip(needs, devices, strict=True)]
    sums = [
        of_slot if own else [room[piece % number][: len(term)] for piece, term in enumerate(of_slot)]
        for own, room, of_slot in zip(is_own, rooms, terms, strict=True)
    ]
    left: list[deque[Event]] = [deque() for _ in devices]  # behind each send of a sum whose memory is used again
    with piece_streams(devices, number) as streams:
        for step in range(last + count):
            # A device sends a sum on before it gets the next piece, for which its sending stream would wait.
            for piece in range(max(step - last, 0), min(step + 1, count)):
                slot = step - piece
                total, own = sums[slot][piece], terms[slot][piece]
                if len(left[slot]) > 1:
                    left[slot].popleft().make_wait(streams.of_device(devices[slot])[RECEIVING])
                streams.use(devices[slot], RECEIVING)
                if slot:
                    streams.use(devices[slot - 1], SENDING)
                    received = rooms[slot][0][: len(own)] if is_own[slot] else total
                    copy(received, sums[slot - 1][piece])
                    total.add_(received if is_own[slot] else own)
                elif is_wide:
                    total.copy_(own)
                if slot or is_wide:
                    streams.order(devices[slot], RECEIVING, SENDING)
                if slot == last:
                    streams.use(devices[last], SENDING)
                    for target, part in _parts_of_rows(out, total, piece * size):
                        if target.device != devices[last]:
                            streams.use(target.device, RECEIVING)
                        copy(target, part)
                senders = (slot - 1, slot) if slot == last else (slot - 1,)
                for sender in senders if number > 1 and slot else ():
                    if not is_own[sender]:
                        left[sender].append(Event(streams.of_device(devices[sender])[SENDING]))


def _parts_of_rows(rows: Sequence[Tensor], piece: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of rows that a piece of the matrix has, which begins at the element ``start``, and what they get."""
    length, end = rows[0].numel(), start + len(piece)
    for number in range(start // length, -(-end // length)):
        begin = number * length
        first, until = max(start, begin), min(end, begin + length)
        yield rows[number].view(-1)[first - begin : until - begin], piece[first - start : until - start]
