"""The choice of transport and route for a call: a pure function, so that a test can try any machine.

Its arguments come from the rooms beside it: ``settings`` (what the user asks for), ``peer_check`` (the pairs that are
not trusted), ``links`` (what copies share), and the transports (why they are not available). ``comm.select`` calls it,
for calls and for the report about the machine. It copies nothing and asks no device.

Plain copies take the route that takes the least time for this number of devices, this many bytes and these links:
``comm.times`` has the formulas and their reasons.

A transport that was asked for serves the calls that it supports. All others fall back to plain copies, and the reason
says why:

- *nccl* supports broadcasts, ``all_gather``, and, if the caller allows any order, sums and ``reduce_scatter``. *cupy*
  supports broadcasts and sums. All else uses plain copies.
- Both work between CUDA devices. A call with the CPU or with another type of accelerator, or with fewer than two
  accelerators, falls back.
- *nccl* takes each device once. A sum with two terms on one device falls back.
- Within a call that it serves, a transport leaves to plain copies: tensors that do not travel flat, dtypes that it
  cannot add, and *nccl*'s sums on a device that brings no term.

A call that it supports raises ``ValueError`` if it can do nothing at all between these devices: none of the
accelerators is a CUDA device, the transport is not available, or copies between two of the devices have failed
`peer_check`.

*host* supports every call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations
from typing import Literal, NamedTuple, TypeAlias

import torch

from dataparallel.comm.links import Links
from dataparallel.comm.peer_check import VARIABLE as PEER_CHECK_VARIABLE
from dataparallel.comm.peer_check import Pair
from dataparallel.comm.settings import Settings
from dataparallel.comm.times import fastest

__all__ = ["Choice", "Collective", "choose"]

Collective: TypeAlias = Literal["broadcast", "reduce_add", "gather", "scatter", "all_gather", "reduce_scatter"]

SUPPORTED: dict[str, tuple[Collective, ...]] = {
    "nccl": ("broadcast", "reduce_add", "all_gather", "reduce_scatter"),
    "cupy": ("broadcast", "reduce_add"),
}
"""What these transports support. Plain copies and the host support everything."""


class Choice(NamedTuple):
    """A transport, a route, and the reason in words. Only *copy* has routes; other transports have "star" there."""

    transport: str
    route: str
    reason: str


def choose(
    work: Collective,
    devices: Sequence[torch.device],
    nbytes: int,
    settings: Settings,
    unavailable: str | None,
    untrusted: Collection[Pair],
    links: Links,
    widened: bool = False,
) -> Choice:
    """The transport and the route for a call's tensors.

    Args:
        work: the operation.
        devices: in slot order, the source's or the destination's included. One may be listed several times.
        nbytes: the bytes that each device receives in a broadcast, or brings to a sum.
        settings: what the user asks for. A route without a transport asks for plain copies: only they have routes.
        unavailable: why the transport that is asked for is not available between these devices; ``None`` if it is.
        untrusted: ordered pairs of devices that have failed `peer_check`. A call with both devices of such a pair goes
            through the host, even if plain copies were asked for.
        links: between the accelerators.
        widened: True for 16-bit floats, which are summed in 32 bits.

    Raises:
        ValueError: the transport that was asked for can do nothing between these devices; the message says why.
    """
    distinct = [*dict.fromkeys(devices)]
    if len(distinct) < 2:
        return Choice("copy", "star", "fewer than two devices, so nothing has to travel")
    broken = next((pair for pair in permutations(distinct, 2) if pair in untrusted), None)
    asked = settings.transport
    preface = "plain tensor copies serve every backend"
    if asked == "host":
        return Choice("host", "star", "it was asked for")
    if asked == "copy":
        preface = "plain tensor copies were asked for"
    elif asked is not None:
        why_not = _why_not_supported(asked, work, devices, settings)
        if why_not is None:
            problem = _why_unavailable(distinct, unavailable, broken)
            if problem is not None:
                raise ValueError(
                    f"transport {asked!r} was asked for and cannot serve this {work} "
                    f"between {', '.join(map(str, distinct))}: {problem}"
                )
            return Choice(asked, "star", "it was asked for")
        preface = f"{asked!r} was asked for, but this {work} falls back to plain copies: {why_not}"
    if broken is not None:
        return Choice("host", "star", f"copies from {broken[0]} to {broken[1]} have failed their check")
    if len(distinct) < len(devices):
        # Slots on one device share its links, and by shards each of them would need memory of its own there.
        links = links._replace(is_all_to_all=False)
    route, reason = _route(work, distinct, nbytes, settings, links, widened)
    return Choice("copy", route, f"{preface}; {route}: {reason}")


def _route(
    work: Collective,
    distinct: Sequence[torch.device],
    nbytes: int,
    settings: Settings,
    links: Links,
    widened: bool,
) -> tuple[str, str]:
    """The route of plain copies between distinct devices, and the reason."""
    if work not in ("broadcast", "reduce_add"):
        return "star", f"a {work} has no routes"
    if settings.route is not None:
        if work == "reduce_add" and settings.route == "tree":
            return "star", "a tree was asked for, but would not add in slot order"
        return settings.route, "it was asked for"
    number = len(distinct)
    if number == 2:
        return "star", "two devices"
    if any(device.type == "cpu" for device in distinct):
        # Copies from and to the CPU block, so a chain would wait at each chunk.
        return "star", "the cpu is one of the devices"
    amount = f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
    linked = "all-to-all links" if links.is_all_to_all else "links that may be shared"
    route = fastest(work, number, nbytes, links, widened)
    return route, f"the fastest, by formula, for {amount} between {number} devices with {linked}"


def _why_not_supported(
    transport: str, work: Collective, devices: Sequence[torch.device], settings: Settings
) -> str | None:
    """Why the transport does not support this call, which then falls back to plain copies; ``None`` if it does."""
    adds = work in ("reduce_add", "reduce_scatter")
    if work not in SUPPORTED[transport]:
        return f"{transport} has no {work}"
    if transport == "nccl" and adds and settings.deterministic:
        return "nccl adds in an order of its own; pass deterministic=False if the last bits may differ"
    accelerators = [device for device in devices if device.type != "cpu"]
    if len({*accelerators}) < 2:
        return f"{transport} works between accelerators, and there are fewer than two"
    if all(device.type != "cuda" for device in accelerators):
        return None  # `_why_unavailable` says so, and the call raises
    other = next((device for device in devices if device.type != "cuda"), None)
    if other is not None:
        return f"{transport} works between CUDA devices, and {other} is none"
    twice = next((device for device in devices if devices.count(device) > 1), None)
    if transport == "nccl" and adds and twice is not None:
        return f"nccl takes each device once, and {twice} is listed more than once"
    return None


def _why_unavailable(distinct: Sequence[torch.device], unavailable: str | None, broken: Pair | None) -> str | None:
    """Why a transport can do nothing between these devices; ``None`` if it can serve them."""
    for device in distinct:
        if device.type not in ("cuda", "cpu"):
            return f"it needs CUDA devices, and {device} is none"
    if unavailable is not None:
        return unavailable
    if broken is not None:
        return (
            f"copies from {broken[0]} to {broken[1]} have failed their check; use 'host', "
            f"or set {PEER_CHECK_VARIABLE}=0 if you know better"
        )
    return None
