"""`CommSettings`: the user's transport and route, and whether sums keep their order.

`using` sets them for a block of code, two environment variables for the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from dataparallel.arguments import checked

TRANSPORTS = ("copy", "nccl", "cupy", "host")
ROUTES = ("star", "chain")

TRANSPORT_VARIABLE = "DATAPARALLEL_TRANSPORT"
ROUTE_VARIABLE = "DATAPARALLEL_ROUTE"


@dataclass(frozen=True)
class CommSettings:
    """The settings of a call; ``None`` leaves the choice to the library.

    Attributes:
        transport: one of `TRANSPORTS`.
        route: one of `ROUTES`.
        deterministic: if True, sums are added in slot order, and have the same bits in every run. If False, NCCL may
            add them, in an order of its own.
    """

    transport: str | None = None
    route: str | None = None
    deterministic: bool = True


# The settings of the block around this code. A context variable, so that threads which run in a copy of the caller's
# context see the caller's settings.
_in_block: ContextVar[CommSettings | None] = ContextVar("dataparallel.comm.settings", default=None)


@contextmanager
def held(settings: CommSettings | None) -> Iterator[None]:
    """Inside, `current` returns ``settings``: for a call with many tensors, and for later work in another thread."""
    token = _in_block.set(settings)
    try:
        yield
    finally:
        _in_block.reset(token)


@contextmanager
def using(
    *, transport: str | None = None, route: str | None = None, deterministic: bool | None = None
) -> Iterator[None]:
    """Inside, tensors travel as set here. An argument that is ``None`` keeps the setting of the block around it.

    The settings hold in this thread and in the library's workers. A thread that a user starts has them if it runs in a
    copy of the context (``contextvars.copy_context``).

    Args:
        transport: one of `TRANSPORTS`. It serves the calls that it supports; other calls fall back to plain copies, see
            ``dataparallel.comm.transport_choice``.
        route: one of `ROUTES`, for a broadcast or a sum between more than two devices.
        deterministic: see `CommSettings`.

    Raises:
        ValueError: an unknown transport or route.
        TypeError: one that is no string; ``deterministic`` is not a bool.
    """
    arguments = {
        "transport": checked("transport", transport, *TRANSPORTS, None),
        "route": checked("route", route, *ROUTES, None),
        "deterministic": checked("deterministic", deterministic, bool, None),
    }
    with held(_settings({name: value for name, value in arguments.items() if value is not None})):
        yield


def current() -> CommSettings:
    """The settings that hold here: those of `using`, else those of the environment, else the defaults.

    Raises:
        ValueError: an environment variable that counts has an impossible value.
    """
    return _settings({})


def _settings(named: Mapping[str, Any]) -> CommSettings:
    around = _in_block.get()
    if around is not None:
        return replace(around, **named)
    return CommSettings(
        transport=named.get("transport") or _from_environment(TRANSPORT_VARIABLE, TRANSPORTS),
        route=named.get("route") or _from_environment(ROUTE_VARIABLE, ROUTES),
        deterministic=named.get("deterministic", True),
    )


def _from_environment(variable: str, possible: tuple[str, ...]) -> str | None:
    value = os.environ.get(variable)
    return checked(variable, value, *possible) if value else None
