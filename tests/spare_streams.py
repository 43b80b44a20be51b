"""Streams for tests that ask what is ordered after what.

A backend has a limited number of streams, and then hands out the same ones again. The library makes its own when they
are first needed. A test that compares two streams has to have two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dataparallel.comm import duplex
from dataparallel.streams import ahead, arrivals, gradients, isolated

ISOLATED = 7  # on each device, for eight slots
TURNS = 4  # more side streams for gradients than this would be the first ones again


def make_library_streams(devices: Iterable[torch.device]) -> None:
    """Makes all streams that the library uses on ``devices``, while each of them is still another one."""
    for device in devices:
        made = library_streams(device)
        assert len({*made}) == len(made), f"{device} has too few streams"


def library_streams(device: torch.device) -> list[torch.Stream]:
    """The library's streams on a device. Their rooms keep them under names of their own."""
    here = torch.accelerator.current_stream(device)
    return [
        *(gradients.side_stream(device, turn) for turn in range(TURNS)),
        duplex._second_stream(device),
        arrivals.parameter_stream(device),
        arrivals.filling_stream(device),
        ahead._side_stream(device),
        *(isolated._stream(device, number, here) for number in range(1, ISOLATED + 1)),
    ]


def spare_stream(device: torch.device, *others: torch.Stream) -> torch.Stream:
    """A stream that is neither one of the library's nor one of ``others``."""
    taken = {*library_streams(device), *others}
    while (stream := torch.Stream(device)) in taken:
        pass
    return stream
