"""Which replica runs here, and how many there are."""

from __future__ import annotations

from dataparallel.threads.meetings import here

__all__ = ["count", "index"]


def index() -> int:
    """The number of the replica that is running, in slot order; 0 outside of a parallel forward."""
    place = here()
    return 0 if place is None else place.index


def count() -> int:
    """How many replicas the running call has; 1 outside of a parallel forward."""
    place = here()
    return 1 if place is None else place.count
