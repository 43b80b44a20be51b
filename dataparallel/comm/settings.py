"""`using` asks for a transport in a block of code, an environment variable for the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dataparallel.arguments import checked

TRANSPORTS = ("copy", "cupy", "host")
TRANSPORT_VARIABLE = "DATAPARALLEL_TRANSPORT"

# What the block around this code asks for. A context variable, so that threads which run in a copy of the caller's
# context see the caller's settings.
_in_block: ContextVar[str | None] = ContextVar("dataparallel.comm.settings", default=None)


@contextmanager
def held(transport: str | None) -> Iterator[None]:
    """Inside, `current` returns ``transport``, or what the environment says: for later work in another thread."""
    token = _in_block.set(transport)
    try:
        yield
    finally:
        _in_block.reset(token)


@contextmanager
def using(*, transport: str | None = None) -> Iterator[None]:
    """Inside, tensors travel by this transport. ``None`` keeps the setting of the block around it.

    The setting holds in this thread and in the library's workers. A thread that a user starts has it if it runs in a
    copy of the context (``contextvars.copy_context``).

    Args:
        transport: one of ``"copy"``, ``"cupy"``, ``"host"``. What kernels do not carry falls back to plain copies.

    Raises:
        ValueError: an unknown transport.
        TypeError: it is no string.
    """
    with held(checked("transport", transport, *TRANSPORTS, None) or current()):
        yield


def current() -> str | None:
    """The transport that is asked for here, by `using` or else by the environment; ``None`` leaves it to the library.

    Raises:
        ValueError: the environment variable counts, and has an impossible value.
    """
    asked = _in_block.get() or os.environ.get(TRANSPORT_VARIABLE)
    return checked(TRANSPORT_VARIABLE, asked, *TRANSPORTS) if asked else None
