"""What a user may say about how tensors travel: the transport, the route, and whether sums keep their order.

`using` says it for a block of code, two environment variables for the process; what nobody has said is the library's
choice. This room only knows names and who said them: what they mean is ``choice``'s business. Anyone may call it.
Beside them it carries whether slots are isolated: for tests, see `dataparallel.testing.isolated_slots`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

__all__ = [
    "ROUTES",
    "ROUTE_VARIABLE",
    "TRANSPORTS",
    "TRANSPORT_VARIABLE",
    "Settings",
    "are_slots_isolated",
    "current",
    "held",
    "isolating",
    "using",
]

TRANSPORTS = ("copy", "nccl", "cupy", "host")
ROUTES = ("star", "tree", "chain")

TRANSPORT_VARIABLE = "DATAPARALLEL_TRANSPORT"
ROUTE_VARIABLE = "DATAPARALLEL_ROUTE"


@dataclass(frozen=True)
class Settings:
    """What is asked for; ``None`` is the library's choice.

    Attributes:
        transport: one of `TRANSPORTS`.
        route: one of `ROUTES`.
        deterministic: sums are added in slot order, so that they have the same bits in every run. Without it NCCL
            may add them, in an order of its own.
        isolated: slots on one device share nothing, as if each had a device of its own.
    """

    transport: str | None = None
    route: str | None = None
    deterministic: bool = True
    isolated: bool = False


@dataclass(frozen=True)
class _Overrides:
    """What `using` and `isolating` blocks have named so far."""

    transport: str | None = None
    route: str | None = None
    deterministic: bool | None = None
    isolated: bool = False


_NOTHING = _Overrides()

# A context variable, so that threads which run in a copy of the caller's context see what the caller has said.
_overrides: ContextVar[_Overrides] = ContextVar("dataparallel.comm.settings", default=_NOTHING)


@contextmanager
def using(
    *, transport: str | None = None, route: str | None = None, deterministic: bool | None = None
) -> Iterator[None]:
    """Inside, tensors travel as said here; what is ``None`` stays what it was, in nested blocks too.

    It holds in this thread and in the library's workers. Threads that a user starts see it where they run in a copy of
    the context (``contextvars.copy_context``).

    Args:
        transport: one of `TRANSPORTS`. It carries what it can, and the rest goes by plain copies; ``choice`` says what.
        route: one of `ROUTES`: which way a broadcast or a sum takes between more than two devices.
        deterministic: see `Settings`.

    Raises:
        ValueError: a name that is none of those.
        TypeError: ``deterministic`` is no bool.
    """
    if transport is not None:
        _check("transport", transport, TRANSPORTS)
    if route is not None:
        _check("route", route, ROUTES)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is True or False; got {deterministic!r}")
    said = {"transport": transport, "route": route, "deterministic": deterministic}
    named = {name: value for name, value in said.items() if value is not None}
    token = _overrides.set(replace(_overrides.get(), **named))  # type: ignore[arg-type]
    try:
        yield
    finally:
        _overrides.reset(token)


@contextmanager
def isolating() -> Iterator[None]:
    """Inside, slots are isolated, in this thread and where its context goes, as with `using`."""
    token = _overrides.set(replace(_overrides.get(), isolated=True))
    try:
        yield
    finally:
        _overrides.reset(token)


def are_slots_isolated() -> bool:
    """Whether an `isolating` block is around this code."""
    return _overrides.get().isolated


@contextmanager
def held(settings: Settings) -> Iterator[None]:
    """Inside, `current` is ``settings``: for work that another thread does later, such as a backward pass."""
    token = _overrides.set(_Overrides(settings.transport, settings.route, settings.deterministic, settings.isolated))
    try:
        yield
    finally:
        _overrides.reset(token)


def current() -> Settings:
    """What holds here and now: what `using` says, else what the environment says, else the defaults.

    Raises:
        ValueError: an environment variable that counts has a value that is not possible.
    """
    said = _overrides.get()
    return Settings(
        transport=said.transport or _from_environment(TRANSPORT_VARIABLE, TRANSPORTS),
        route=said.route or _from_environment(ROUTE_VARIABLE, ROUTES),
        deterministic=True if said.deterministic is None else said.deterministic,
        isolated=said.isolated,
    )


def _from_environment(variable: str, possible: tuple[str, ...]) -> str | None:
    value = os.environ.get(variable, "")
    if value == "":
        return None
    _check(f"the environment variable {variable}", value, possible)
    return value


def _check(name: str, value: object, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise ValueError(f"{name} is one of {', '.join(map(repr, possible))}; got {value!r}")
