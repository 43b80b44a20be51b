"""An error for lack of memory that says for which unit it was, on which device, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["named_if_no_room", "no_room_for"]


def no_room_for(
    what: str, unit: str, device: torch.device, number_of_bytes: int, error: torch.OutOfMemoryError
) -> torch.OutOfMemoryError:
    """The error to raise from ``error``: ``device`` has no room for ``what`` of a unit, which takes so many bytes."""
    return torch.OutOfMemoryError(
        f"{device} has no room for the {number_of_bytes:,} bytes of {what} of the unit {unit!r}: shard smaller units, "
        f"prefetch less, or use more devices. {error}"
    )


@contextmanager
def named_if_no_room(what: str, unit: str, device: torch.device, number_of_bytes: int) -> Iterator[None]:
    """Around allocations for a unit on a device. Arguments are those of `no_room_for`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_room_for(what, unit, device, number_of_bytes, error) from error
