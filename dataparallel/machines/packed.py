"""`Part`: flat tensors of several dtypes that go to all machines as one message, in bytes.

``peer_rounds`` packs what it exchanges. All parts of an exchange are on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Part", "packed", "unpacked"]

_ALIGNED = 16  # bytes, the largest element of any dtype


class Part(NamedTuple):
    """One tensor of an exchange.

    Attributes:
        flat: 1-D: what goes to each machine, one after the other.
        send: how many elements go to each machine.
        receive: how many elements come from each.
    """

    flat: Tensor
    send: Sequence[int]
    receive: Sequence[int]


def packed(parts: Sequence[Part]) -> Part:
    """The parts as one. A single one stays as it is."""
    if len(parts) == 1:
        return parts[0]
    rows = [[_bytes(piece) for piece in part.flat.split([*part.send])] for part in parts]
    messages = [*zip(*rows, strict=True)]
    flat = torch.cat([piece for message in messages for piece in message])
    send = [sum(piece.numel() for piece in message) for message in messages]
    return Part(flat, send, [sum(sizes) for sizes in zip(*map(_room, parts), strict=True)])


def unpacked(parts: Sequence[Part], found: Tensor) -> list[Tensor]:
    """What has come for each part: from each machine, one after the other."""
    if len(parts) == 1:
        return [found]
    pieces: list[list[Tensor]] = [[] for _ in parts]
    sizes = [room for of_machine in zip(*map(_room, parts), strict=True) for room in of_machine]
    for at, first in enumerate([0, *accumulate(sizes)][:-1]):
        part, machine = parts[at % len(parts)], at // len(parts)
        used = part.receive[machine] * part.flat.element_size()
        pieces[at % len(parts)].append(found[first : first + used].view(part.flat.dtype))
    return [torch.cat(of_part) for of_part in pieces]


def _room(part: Part) -> list[int]:
    """The bytes that come from each machine."""
    return [-(-size * part.flat.element_size() // _ALIGNED) * _ALIGNED for size in part.receive]


def _bytes(piece: Tensor) -> Tensor:
    found = piece.contiguous().view(torch.uint8)
    return pad(found, (0, -found.numel() % _ALIGNED))
