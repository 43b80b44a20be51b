"""The choice of transport and route for a call: a pure function, so that a test can try any machine.

Its arguments come from the rooms beside it: ``settings`` (what the user asks for), ``peer_check`` (the pairs that are
not trusted), and the transports (why they are not available). ``comm.select`` calls it, for calls and for the report
about the machine. It copies nothing and asks no device.

A *route* is the order in which devices pass data on. With n devices, s bytes, k chunks, latency a for each copy and
bandwidth b of a link, and a device that sends one copy at a time, a route takes this time:

- *star*: the root sends to each device, or each sends to the root: (n - 1) * (a + s/b).
- *tree*: a binary tree, for broadcasts. Every device sends at most twice: about log2(n) levels of one or two copies
  each, at most 2 * floor(log2(n)) * (a + s/b), for 8 devices 4 * (a + s/b).
- *chain*: each device passes chunk by chunk to the next: (n - 2 + k) * (a + s/(k*b)). In a sum each slot adds its own
  term to the partial sum that arrives, so terms are added in slot order; the result then goes back to the root.

With few bytes the latency a counts, and the route with the fewest copies in a row wins. With many bytes s/b counts: a
chain then takes about s/b for any n, since no link passes a byte twice.

A transport that was asked for serves the calls that it supports. All others fall back to plain copies, and the reason
says why:

- *nccl* supports broadcasts, and sums if the caller allows any order. *cupy* supports broadcasts and sums. Scatter and
  gather use plain copies.
- Both work between CUDA devices. A call with the CPU or with another type of accelerator, or with fewer than two
  accelerators, falls back.
- *nccl* takes each device once. A sum with two terms on one device falls back, and so do isolated slots on one device.
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

from dataparallel.comm.peer_check import VARIABLE as PEER_CHECK_VARIABLE
from dataparallel.comm.peer_check import Pair
from dataparallel.comm.settings import Settings

__all__ = ["Choice", "Collective", "choose"]

Collective: TypeAlias = Literal["broadcast", "reduce_add", "gather", "scatter"]

CHAIN_FROM_BYTES = 256 * 2**10
"""About a * b for PCIe, with a = 10 us and b = 25 GB/s. Below it a copy takes longer to start than to send."""

SUPPORTED: tuple[Collective, ...] = ("broadcast", "reduce_add")
"""What *nccl* and *cupy* support. Plain copies and the host support everything."""


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

    Raises:
        ValueError: the transport that was asked for can do nothing between these devices; the message says why.
    """
    distinct = [*dict.fromkeys(devices)]
    if len(distinct) < 2 and not (settings.isolated and len(devices) > 1):
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
    route, reason = _route(work, distinct, nbytes, settings)
    return Choice("copy", route, f"{preface}; {route}: {reason}")


def _route(work: Collective, distinct: Sequence[torch.device], nbytes: int, settings: Settings) -> tuple[str, str]:
    """The route of plain copies between distinct devices, and the reason."""
    if work not in ("broadcast", "reduce_add"):
        return "star", f"in a {work} each chunk goes to one device"
    if settings.route is not None:
        if work == "reduce_add" and settings.route == "tree":
            return "star", "a tree was asked for, but would not add in slot order"
        return settings.route, "it was asked for"
    number = len(distinct)
    if number <= 2:
        return "star", "two devices" if number == 2 else "isolated slots on one device"
    if any(device.type == "cpu" for device in distinct):
        # Copies from and to the CPU block, so a chain would wait at each chunk.
        return "star", "the cpu is one of the devices"
    amount = f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
    size = f"{amount} between {number} devices"
    if nbytes >= CHAIN_FROM_BYTES:
        return "chain", size
    return ("tree" if work == "broadcast" else "star"), size


def _why_not_supported(
    transport: str, work: Collective, devices: Sequence[torch.device], settings: Settings
) -> str | None:
    """Why the transport does not support this call, which then falls back to plain copies; ``None`` if it does."""
    if work not in SUPPORTED:
        return f"{transport} has no {work}"
    if transport == "nccl" and work == "reduce_add" and settings.deterministic:
        return "nccl adds in an order of its own; pass deterministic=False if the last bits may differ"
    accelerators = [device for device in devices if device.type != "cpu"]
    if len({*accelerators}) < 2 and not (settings.isolated and len(accelerators) > 1):
        return f"{transport} works between accelerators, and there are fewer than two"
    if all(device.type != "cuda" for device in accelerators):
        return None  # `_why_unavailable` says so, and the call raises
    other = next((device for device in devices if device.type != "cuda"), None)
    if other is not None:
        return f"{transport} works between CUDA devices, and {other} is none"
    twice = next((device for device in devices if devices.count(device) > 1), None) if transport == "nccl" else None
    if twice is not None and (work == "reduce_add" or settings.isolated):
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
