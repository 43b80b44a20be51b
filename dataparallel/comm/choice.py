"""Which transport and which route carry a call: a pure function of what is known, so that any machine can be tried.

What is known comes from the rooms beside this one: ``settings`` (what the user asks for), ``topology`` (what lies
between the devices), ``peer_check`` (which pairs are not to be trusted). ``comm`` asks at each call, and the report
about the machine shows the answer. Nothing is copied here and no device is asked.

A *route* is the order in which devices pass data on. With n devices, s bytes, k chunks, latency a for each copy and
bandwidth b of a link, and a device that sends one copy at a time:

- *star*: the root sends to each device, or each sends to the root: (n - 1) * (a + s/b).
- *tree*: a binary tree, for broadcasts; every device sends at most twice: about log2(n) levels of one or two copies
  each, at most 2 * floor(log2(n)) * (a + s/b), for 8 devices 4 * (a + s/b).
- *chain*: each device passes chunk by chunk to the next: (n - 2 + k) * (a + s/(k*b)). In a sum each slot adds its own
  to what has come, so that terms are added in slot order, and the result has its way home to go.

With few bytes a counts and the fewest copies in a row win; with many bytes s/b does, and a chain tends to one s/b
whatever n is, since no link carries a byte twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import permutations
from typing import Literal, NamedTuple, TypeAlias

import torch

from dataparallel.comm.peer_check import VARIABLE as PEER_CHECK_VARIABLE
from dataparallel.comm.peer_check import Pair
from dataparallel.comm.settings import Settings
from dataparallel.comm.topology import Link, Topology

__all__ = ["Choice", "Work", "choose"]

Work: TypeAlias = Literal["broadcast", "reduce_add", "gather", "scatter"]

CHAIN_FROM_BYTES = 256 * 2**10
"""About a * b for PCIe, with a = 10 us and b = 25 GB/s. Fewer bytes are sent in less time than it takes to begin."""

CUPY_FROM_TENSORS = 4
"""One kernel takes the place of flattening, copying and unflattening, three launches or more for each device; with
fewer tensors there is next to nothing to flatten, and plain copies run on the copy engines beside the compute."""

NCCL_FROM_BYTES = 4 * 2**20
"""NCCL sends rings and trees through all NVLinks at once, but a launch takes a lock and tens of microseconds; 4 MiB
pass one NVLink direction (25 to 50 GB/s) in 80 to 160."""

# What each transport does. Other work is done by plain copies even where the user asks for the transport.
_WORK: dict[str, tuple[Work, ...]] = {
    "nccl": ("broadcast", "gather", "reduce_add"),
    "cupy": ("broadcast", "reduce_add"),
    "host": ("broadcast", "gather", "reduce_add", "scatter"),
}


class Choice(NamedTuple):
    """Which transport and which route, and the reason in words. Only *copy* has routes: the others' is "star"."""

    transport: str
    route: str
    reason: str


def choose(
    work: Work,
    topology: Topology,
    nbytes: int,
    count: int,
    settings: Settings,
    available: Mapping[str, str | None],
    untrusted: Collection[Pair],
) -> Choice:
    """How a call's tensors travel.

    Args:
        work: what is done.
        topology: of all devices that take part, the source's or destination's among them.
        nbytes: how much each device gets in a broadcast, or brings to a sum.
        count: how many tensors these are.
        settings: what the user asks for. A route without a transport asks for plain copies: only they have routes.
        available: for each transport ``None``, or why it is not available; plain copies always are.
        untrusted: ordered pairs of devices that have failed `peer_check`. A call that has both devices of such a pair
            goes through the host, in place of plain copies that were asked for too.

    Raises:
        ValueError: the transport that is asked for cannot do it; the message says why.
    """
    if len(topology.distinct) < 2 and not (settings.isolated and len(topology.devices) > 1):
        return Choice("copy", "star", "fewer than two devices: within one device only sums and own copies are made")
    broken = _broken_pair(topology, untrusted)
    asked = settings.transport
    if asked is not None and work in _WORK.get(asked, ()):
        problem = _why_not(asked, work, topology, settings, available, broken)
        if problem is not None:
            raise ValueError(
                f"transport {asked!r} was asked for and cannot carry this {work} "
                f"between {', '.join(map(str, topology.distinct))}: {problem}"
            )
        return Choice(asked, "star", "it was asked for")
    if broken is not None:
        return Choice("host", "star", f"copies from {broken[0]} to {broken[1]} have failed their check")
    if asked is None and settings.route is None:
        faster = _faster_than_copies(work, topology, nbytes, count, settings, available)
        if faster is not None:
            return faster
    route, reason = _route(work, topology, nbytes, settings)
    if asked == "copy":
        return Choice("copy", route, f"plain tensor copies were asked for; {route}: {reason}")
    if asked is not None:
        return Choice("copy", route, f"{asked!r} was asked for and does no {work}; {route}: {reason}")
    return Choice("copy", route, f"plain tensor copies serve every backend; {route}: {reason}")


def _faster_than_copies(
    work: Work, topology: Topology, nbytes: int, count: int, settings: Settings, available: Mapping[str, str | None]
) -> Choice | None:
    def may(transport: str) -> bool:
        return work in _WORK[transport] and not _why_not(transport, work, topology, settings, available, None)

    if count >= CUPY_FROM_TENSORS and may("cupy"):
        return Choice("cupy", "star", f"one kernel for {count} tensors between devices with peer access")
    is_large = work == "broadcast" and nbytes >= NCCL_FROM_BYTES
    if is_large and len(topology.distinct) > 2 and topology.slowest is Link.NVLINK and may("nccl"):
        return Choice("nccl", "star", f"a broadcast of {_words(nbytes)} over {len(topology.distinct)} linked by NVLink")
    return None


def _route(work: Work, topology: Topology, nbytes: int, settings: Settings) -> tuple[str, str]:
    """The route of plain copies, and the reason."""
    if work not in ("broadcast", "reduce_add"):
        return "star", f"in a {work} no chunk is for more than one device"
    if settings.route is not None:
        if work == "reduce_add" and settings.route == "tree":
            return "star", "a tree was asked for, and would not add in slot order"
        return settings.route, "it was asked for"
    number = len(topology.distinct)
    if number <= 2:
        return "star", "two devices" if number == 2 else "isolated slots on one device"
    if any(device.type == "cpu" for device in topology.distinct):
        # Copies from and to it block, and a chain would wait at each chunk.
        return "star", "the cpu is one of the devices"
    size = f"{_words(nbytes)} between {number} devices"
    if nbytes >= CHAIN_FROM_BYTES:
        return "chain", size
    return ("tree" if work == "broadcast" else "star"), size


def _why_not(
    transport: str,
    work: Work,
    topology: Topology,
    settings: Settings,
    available: Mapping[str, str | None],
    broken: Pair | None,
) -> str | None:
    """What keeps the transport from doing its work between these devices; ``None`` if nothing does."""
    unavailable = available.get(transport, "it is not built in")
    if unavailable is not None or transport == "host":
        return unavailable
    for device in topology.distinct:
        if device.type != "cuda":
            return f"it needs CUDA devices, and {device} is none"
    if transport == "nccl":
        twice = _listed_twice(topology.devices)
        if twice is not None:
            return f"it needs distinct CUDA devices, and {twice} is listed more than once"
        if work == "reduce_add" and settings.deterministic:
            return "it adds in an order of its own; say deterministic=False where the last bits may differ"
    if transport == "cupy" and topology.without_peer_access is not None:
        one, other = topology.without_peer_access
        return f"it needs peer access between all devices, and {one} and {other} have none"
    if broken is not None:
        return (
            f"copies from {broken[0]} to {broken[1]} have failed their check; use 'host', "
            f"or set {PEER_CHECK_VARIABLE}=0 if you know better"
        )
    return None


def _broken_pair(topology: Topology, untrusted: Collection[Pair]) -> Pair | None:
    """The first pair in slot order that is not trusted."""
    if not untrusted:
        return None
    return next((pair for pair in permutations(topology.distinct, 2) if pair in untrusted), None)


def _listed_twice(devices: tuple[torch.device, ...]) -> torch.device | None:
    return next((device for position, device in enumerate(devices) if device in devices[:position]), None)


def _words(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"
