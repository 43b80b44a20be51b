"""Streams for tests that ask what is ordered after what.

A backend has a limited number of streams, and then hands out the same ones again. The library makes its own when they
are first needed. A test that compares two streams has to have two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dataparallel.comm.streams import current


def make_library_streams(devices: Iterable[torch.device]) -> None:
    """Makes all streams that the library uses on ``devices``, while each of them is still another one."""
    for device in devices:
        made = kept_streams(device)
        assert len({*made}) == len(made), f"{device} has too few streams"


def kept_streams(device: torch.device) -> list[torch.Stream]:
    """The library's streams on a device for all purposes, each once."""
    turns = [(purpose, turn) for purpose, streams in current._STREAMS.items() for turn in range(len(streams))]
    return [*dict.fromkeys(current.kept_stream(device, purpose, turn) for purpose, turn in turns)]


def spare_stream(device: torch.device, *others: torch.Stream) -> torch.Stream:
    """A stream that is neither one of the library's nor one of ``others``."""
    taken = {*kept_streams(device), *others}
    while (stream := torch.Stream(device)) in taken:
        pass
    return stream
