"""Waits that every failure ends: for a collective, for a future, and for another thread of this process.

torch's own waits end with the collective or with the group's timeout. These wait in slices, and ask after each slice
whether there is a reason to give up. ``collectives`` and ``rounds`` wait this way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.futures import Future

__all__ = ["SLICE", "Check", "wait_for", "wait_for_event", "wait_for_future"]

SLICE = 0.2
"""Seconds. A wait asks this often whether it is over for another reason."""

Check = Callable[[], object]
"""Raises if there is no use in waiting on."""


def wait_for(work: distributed.Work, check: Check) -> None:
    """Until the collective of a backend that works on the host is done.

    Raises:
        RuntimeError: torch's own, if the collective has failed; or what ``check`` raises.
    """
    piece = timedelta(seconds=SLICE)
    while True:
        try:
            work.wait(piece)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait(piece)  # it has ended just now, or raises its own error
                return
        check()


def wait_for_event(event: threading.Event, check: Check) -> None:
    """Until another thread sets the event, or ``check`` raises."""
    while not event.wait(SLICE):
        check()


def wait_for_future(future: Future[Any], check: Check) -> None:
    """Until the future has a value or an error, or ``check`` raises."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    wait_for_event(done, check)
