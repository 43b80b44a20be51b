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

A transport that is asked for carries what it can. The rest goes by plain copies, and the reason says why:

- *nccl* carries broadcasts, and sums where the caller allows any order; *cupy* carries broadcasts and sums.
  Batches are scattered and outputs gathered by plain copies.
- Both carry between CUDA devices. Calls that begin or end on the CPU, or on an accelerator of another type, and calls
  with fewer than two accelerators go by plain copies.
- *nccl* takes each device once. Sums of two terms on one device, and isolated slots on one, go by plain copies.
- Within a call, tensors that do not travel flat and dtypes that the transport cannot add are left to plain copies, and
  so are *nccl*'s sums on a device that brings no term.

A call that it would carry is refused (``ValueError``) where it can carry nothing between these devices at all: none of
the accelerators is a CUDA device, the transport is not installed or has brought other data than plain copies, copies
between two of the devices have failed `peer_check`, or (*cupy*) two of them cannot reach each other's memory.

*host* carries everything.

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

__all__ = ["Choice", "Collective", "choose"]

Collective: TypeAlias = Literal["broadcast", "reduce_add", "gather", "scatter"]

CHAIN_FROM_BYTES = 256 * 2**10
"""About a * b for PCIe, with a = 10 us and b = 25 GB/s. Fewer bytes are sent in less time than it takes to begin."""

CUPY_FROM_TENSORS = 4
"""One kernel takes the place of flattening, copying and unflattening, three launches or more for each device; with
fewer tensors there is next to nothing to flatten, and plain copies run on the copy engines beside the compute."""

NCCL_FROM_BYTES = 4 * 2**20
"""NCCL sends rings and trees through all NVLinks at once, but a launch takes a lock and tens of microseconds; 4 MiB
pass one NVLink direction (25 to 50 GB/s) in 80 to 160."""

# What each transport does.
_WORK: dict[str, tuple[Collective, ...]] = {
    "nccl": ("broadcast", "reduce_add"),
    "cupy": ("broadcast", "reduce_add"),
    "host": ("broadcast", "gather", "reduce_add", "scatter"),
}


class Choice(NamedTuple):
    """Which transport and which route, and the reason in words. Only *copy* has routes: the others' is "star"."""

    transport: str
    route: str
    reason: str


def choose(
    work: Collective,
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
        ValueError: the transport that is asked for can carry nothing between these devices; the message says why.
    """
    if len(topology.distinct) < 2 and not (settings.isolated and len(topology.devices) > 1):
        return Choice("copy", "star", "fewer than two devices: within one device only sums and own copies are made")
    broken = _broken_pair(topology, untrusted)
    asked = settings.transport
    preface = "plain tensor copies serve every backend"
    if asked == "copy":
        preface = "plain tensor copies were asked for"
    elif asked is not None:
        left = _why_left(asked, work, topology, settings)
        if left is None:
            problem = _why_refused(asked, topology, available, broken)
            if problem is not None:
                raise ValueError(
                    f"transport {asked!r} was asked for and cannot carry this {work} "
                    f"between {', '.join(map(str, topology.distinct))}: {problem}"
                )
            return Choice(asked, "star", "it was asked for")
        preface = f"{asked!r} was asked for and leaves this {work} to plain copies: {left}"
    if broken is not None:
        return Choice("host", "star", f"copies from {broken[0]} to {broken[1]} have failed their check")
    if asked is None and settings.route is None:
        faster = _faster_than_copies(work, topology, nbytes, count, settings, available)
        if faster is not None:
            return faster
    route, reason = _route(work, topology, nbytes, settings)
    return Choice("copy", route, f"{preface}; {route}: {reason}")


def _faster_than_copies(
    work: Collective,
    topology: Topology,
    nbytes: int,
    count: int,
    settings: Settings,
    available: Mapping[str, str | None],
) -> Choice | None:
    def may(transport: str) -> bool:
        left = _why_left(transport, work, topology, settings)
        return left is None and _why_refused(transport, topology, available, None) is None

    if count >= CUPY_FROM_TENSORS and may("cupy"):
        return Choice("cupy", "star", f"one kernel for {count} tensors between devices with peer access")
    is_large = work == "broadcast" and nbytes >= NCCL_FROM_BYTES
    if is_large and len(topology.distinct) > 2 and topology.slowest is Link.NVLINK and may("nccl"):
        return Choice("nccl", "star", f"a broadcast of {_words(nbytes)} over {len(topology.distinct)} linked by NVLink")
    return None


def _route(work: Collective, topology: Topology, nbytes: int, settings: Settings) -> tuple[str, str]:
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


def _why_left(transport: str, work: Collective, topology: Topology, settings: Settings) -> str | None:
    """Why this call is none for the transport, and goes by plain copies; ``None`` if it is one."""
    if work not in _WORK[transport]:
        return f"it does no {work}"
    if transport == "host":
        return None
    if transport == "nccl" and work == "reduce_add" and settings.deterministic:
        return "it adds in an order of its own; say deterministic=False where the last bits may differ"
    accelerators = [device for device in topology.devices if device.type != "cpu"]
    if len({*accelerators}) < 2 and not (settings.isolated and len(accelerators) > 1):
        return "it carries between accelerators, and there are fewer than two"
    if all(device.type != "cuda" for device in accelerators):
        return None  # it is refused
    others = [device for device in topology.distinct if device.type != "cuda"]
    if others:
        return f"it carries between CUDA devices, and {others[0]} is none"
    twice = _listed_twice(topology.devices) if transport == "nccl" else None
    if twice is not None and (work == "reduce_add" or settings.isolated):
        return f"it takes each device once, and {twice} is listed more than once"
    return None


def _why_refused(
    transport: str, topology: Topology, available: Mapping[str, str | None], broken: Pair | None
) -> str | None:
    """Why the transport can carry nothing between these devices; ``None`` if it can."""
    if transport == "host":
        return available.get(transport, "it is not built in")
    for device in topology.distinct:
        if device.type not in ("cuda", "cpu"):
            return f"it needs CUDA devices, and {device} is none"
    unavailable = available.get(transport, "it is not built in")
    if unavailable is not None:
        return unavailable
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
