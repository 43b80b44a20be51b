"""Collectives of matrices that have a row for each device: ``fully_shard`` gathers parameters and adds up gradients.

Where each device pulls a row from each other one, n devices launch n * n copies, and launches take longer than the
copies of few bytes themselves. Here the copies of a device are few, however many devices there are:

- `all_gather` doubles what a device has in each round: it copies all rows that another device has. So it takes about
  log2(n) copies on each device, and each device receives each row once. (Bruck et al., "Efficient algorithms for
  all-to-all communications in multiport message-passing systems", 1997.)
- `reduce_scatter` passes partial sums from each device to the next, in slot order, and the last one sends each device
  its row: two launches for each device and piece.

A transport (``comm.transport``) calls these functions with its own copies. All of them run on the current streams, one
for each device: a second one would need as many waits as there are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from dataparallel.devices import CPU

__all__ = ["Memory", "all_gather", "are_apart", "memory", "reduce_scatter"]

Copy = Callable[[Tensor, Tensor], object]
"""Copies into the first tensor what the second one has. Dtypes are the same."""

Memory = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Makes a tensor without values."""


def memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`Memory` of torch's."""
    return torch.empty(shape, dtype=dtype, device=device)


_PIECES, _IN_PIECES_FROM = 4, 2**18
"""A matrix of more bytes than this travels in pieces: they take turns in the memory of one, and follow each other."""


def are_apart(devices: Sequence[torch.device]) -> bool:
    """True for distinct accelerators."""
    return len({*devices}) == len(devices) and CPU not in devices


def all_gather(copy: Copy, matrices: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copies all ``rows`` into each of the matrices. The matrix at a position is where the row at it is."""
    count = len(rows)
    for slot, (matrix, row) in enumerate(zip(matrices, rows, strict=True)):
        copy(matrix[slot], row)
    have = 1  # each slot has so many rows, from its own one on; the first row comes after the last one
    while have < count:
        more = min(have, count - have)
        for receiver in _in_phases(count, have):
            sender = (receiver + have) % count
            until = min(sender + more, count)
            copy(matrices[receiver][sender:until], matrices[sender][sender:until])
            if (rest := sender + more - until) > 0:
                copy(matrices[receiver][:rest], matrices[sender][:rest])
        have += more


def _in_phases(count: int, distance: int) -> Iterator[int]:
    """All slots, each of which is to receive from the one at this ``distance``, in the order of the launches.

    A device that sends cannot receive meanwhile, because a copy takes the streams of both ends. So first every other
    slot receives, and then the rest: one after the other, each copy would wait for the one before.
    """
    circles = gcd(count, distance)
    length = count // circles
    for phase in (range(0, length - 1, 2), range(1, length, 2), range(length - 1, length) if length % 2 else ()):
        for start in range(circles):
            for step in phase:
                yield (start + step * distance) % count


def reduce_scatter(copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Memory = memory) -> None:
    """Copies row j of the sum of ``matrices``, which is added in the order given, into ``out[j]``.

    Args:
        copy: of the transport.
        matrices: one on each device. A device may have none, or several.
        out: of one dtype, in which the terms are added; there are as many as rows.
        empty: makes memory for what travels.
    """
    devices = [matrix.device for matrix in matrices]
    if len(matrices) > 2 and are_apart(devices):
        _along_a_chain(copy, matrices, out, empty)
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


def _along_a_chain(copy: Copy, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Memory) -> None:
    """A piece is some rows. When a device receives one, it has sent on the one before, from the same memory."""
    dtype, last = out[0].dtype, len(matrices) - 1
    size = -(-len(out) // (_PIECES if matrices[0].nbytes > _IN_PIECES_FROM else 1))
    terms = [matrix.split(size) for matrix in matrices]
    # The first device has nothing to add to, and sends its own terms, unless they are added in another dtype.
    is_sent_as_it_is = matrices[0].dtype == dtype
    needs = range(1 if is_sent_as_it_is else 0, len(matrices))
    partial = {slot: empty(matrices[slot][:size].shape, dtype, matrices[slot].device) for slot in needs}
    count = len(terms[0])
    for step in range(last + count):
        # Of pieces that move in one step, those that are further on leave room for those behind them.
        for piece in range(max(step - last, 0), min(step + 1, count)):
            slot, own = step - piece, terms[step - piece][piece]
            if slot == 0:
                if not is_sent_as_it_is:
                    partial[0][: len(own)].copy_(own)
                continue
            total = partial[slot][: len(own)]
            copy(total, terms[0][piece] if is_sent_as_it_is and slot == 1 else partial[slot - 1][: len(own)])
            total.add_(own)
            if slot == last:
                for row, target in zip(total, out[piece * size :], strict=False):
                    copy(target, row)
