"""`choose`: decides on transport and route of a call, by pure functions, so that a test can try any machine.

``comm.select`` collects the facts. Plain copies take the fastest route, by the formulas below. A transport that the
user asks for serves the calls that it supports; all other calls fall back to plain copies, with a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations
from typing import Literal, NamedTuple, TypeAlias

import torch

from dataparallel.comm.links import Links
from dataparallel.comm.peers import PEER_CHECK_VARIABLE, Pair
from dataparallel.comm.settings import Settings

Collective: TypeAlias = Literal["broadcast", "reduce_add", "gather", "scatter", "all_gather", "reduce_scatter"]

SUPPORTED: dict[str, tuple[Collective, ...]] = {
    "nccl": ("broadcast", "reduce_add", "all_gather", "reduce_scatter"),
    "cupy": ("broadcast", "reduce_add"),
}
"""The operations that these transports support between CUDA devices. Plain copies and the host support all.

*nccl* makes sums only if the caller allows any order, and takes each device once. A call with the CPU, with another
type of accelerator, or with fewer than two accelerators falls back to plain copies. In a call that these transports
serve, plain copies still carry tensors that do not travel flat, sums in dtypes that a transport cannot add, and
*nccl*'s sums on a device that brings no term.
"""


PLAIN = "plain tensor copies serve every backend"
"""Why the user need not ask for a transport."""


class Choice(NamedTuple):
    """A transport, a route, and the reason in words. Only *copy* has routes; for other transports it is "star"."""

    transport: str
    route: str
    reason: str


def choose(
    work: Collective,
    devices: Sequence[torch.device],
    nbytes: int,
    settings: Settings,
    unavailable: str | None,
    failed_pairs: Collection[Pair],
    links: Links,
    widened: bool = False,
) -> Choice:
    """The transport and the route for a call's tensors.

    Args:
        work: the operation.
        devices: in slot order, with the source's or the destination's device. A device may be listed several times.
        nbytes: the bytes that each device receives in a broadcast, or brings to a sum.
        settings: the user's. A route without a transport asks for plain copies, because only they have routes.
        unavailable: why the transport of ``settings`` is not available between these devices; ``None`` if it is.
        failed_pairs: ordered pairs that have failed their check: a call with both devices goes through the host.
        links: between the accelerators.
        widened: True for 16-bit floats, which are summed in 32 bits.

    Raises:
        ValueError: the transport that was asked for can do nothing between these devices.
    """
    distinct = [*dict.fromkeys(devices)]
    if len(distinct) < 2:
        return Choice("copy", "star", "fewer than two devices, so nothing has to travel")
    failed_pair = next((pair for pair in permutations(distinct, 2) if pair in failed_pairs), None)
    transport = settings.transport
    preface = PLAIN
    if transport == "host":
        return Choice("host", "star", "it was asked for")
    if transport == "copy":
        preface = "plain tensor copies were asked for"
    elif transport is not None:
        why_not = _why_not_supported(transport, work, devices, settings)
        if why_not is None:
            problem = _why_unavailable(distinct, unavailable, failed_pair)
            if problem is not None:
                raise ValueError(
                    f"transport {transport!r} was asked for and cannot serve this {work} "
                    f"between {', '.join(map(str, distinct))}: {problem}"
                )
            return Choice(transport, "star", "it was asked for")
        preface = f"{transport!r} was asked for, but this {work} falls back to plain copies: {why_not}"
    if failed_pair is not None:
        return Choice("host", "star", f"copies from {failed_pair[0]} to {failed_pair[1]} have failed their check")
    if len(distinct) < len(devices):
        # Slots on one device share its links, and by shards each slot would need its own memory there.
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
        if work == "broadcast" and settings.route == "shards":
            return "chain", "shards were asked for, but are for sums: a chain passes no byte twice over a link"
        return settings.route, "it was asked for"
    number = len(distinct)
    if number == 2:
        return "star", "two devices"
    if any(device.type == "cpu" for device in distinct):
        # The host waits for copies from and to the CPU, so a chain would wait at each piece.
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
        return None  # `_why_unavailable` gives the reason, and the call raises
    other = next((device for device in devices if device.type != "cuda"), None)
    if other is not None:
        return f"{transport} works between CUDA devices, and {other} is none"
    twice = next((device for device in devices if devices.count(device) > 1), None)
    if transport == "nccl" and adds and twice is not None:
        return f"nccl takes each device once, and {twice} is listed more than once"
    return None


def _why_unavailable(distinct: Sequence[torch.device], unavailable: str | None, failed_pair: Pair | None) -> str | None:
    """Why a transport can do nothing between these devices; ``None`` if it can serve them."""
    for device in distinct:
        if device.type not in ("cuda", "cpu"):
            return f"it needs CUDA devices, and {device} is none"
    if unavailable is not None:
        return unavailable
    if failed_pair is not None:
        return (
            f"copies from {failed_pair[0]} to {failed_pair[1]} have failed their check; use 'host', "
            f"or set {PEER_CHECK_VARIABLE}=0 if you know better"
        )
    return None


# ---- how long a route takes ------------------------------------------------------------------------------------------

# Let n be the number of devices, s the bytes, k the number of pieces, a the time until a copy begins to move data, b
# the bytes per second of a link, and t(x) = a + x/b the time of a copy. A device sends one copy at a time, and receives
# one meanwhile. Adding x bytes takes d(x): the latency of a kernel and three accesses to memory for each byte.
#
# Broadcasts. A star takes (n - 1) t(s), a binomial tree ceil(log2(n)) t(s), a chain (n - 2 + k) t(s/k); the next bucket
# of a model follows along a chain after k steps. By shards the root would send every byte twice, 2 (n - 1) t(s/n): a
# chain of n pieces takes no longer. So broadcasts have no route by shards.
#
# Sums, in slot order. A star takes (n - 1) (t(s) + d(s)). A chain takes n t(s/k) + (n - 1) d(s/k) for the first piece,
# and t(s/k) + d(s/k)/2 for each further one, because two pieces are under way on each device; partial sums of 16-bit
# floats travel in 32 bits. By shards slot j adds the j-th shard of all slots, and the root collects the sums:
# 2 (n - 1) t(s/n) + (n - 1) d(s/n). Each pair then needs a link of its own, so links must be all-to-all.
#
# The host launches one operation after the other: a route takes at least the time of its launches and its last copy.
#
# Weights travel bucket after bucket, so a broadcast is judged by the time of one bucket and of the following ones. Sums
# are hidden behind the backward pass, except the last ones, which are small. So a sum is judged by the time until the
# next sum may follow, and by its launches, because the host could launch the backward meanwhile. The whole time of a
# sum counts only for a tensor larger than any bucket. There shards may win, because a chain has to be filled.

MOST_PIECES = 16
"""Pieces of a chain. More would save less than a tenth of the time, and each piece is a launch on every device."""

_FOLLOWING_BUCKETS = 12
"""The number of following buckets: twelve of 25 MiB are a model of some hundred megabytes."""

_HIDDEN_DIVISOR = 8
"""The time of a sum is divided by this number when routes are compared, because the backward pass and other sums run
meanwhile. The time until the next sum may follow counts in full, or the time of the host's launches if it is longer."""

_HIDDEN_UP_TO_BYTES = 25 * 2**20
"""Bytes. A larger bucket is one tensor, most often an embedding, whose gradient comes last: its sum is not hidden."""

_LAUNCH_SECONDS = {"broadcast": 7e-6, "reduce_add": 5e-6}
"""Seconds of the host for each launch: by a Python thread, and by a thread of the autograd engine, which adds."""

_KERNEL_SECONDS = 3e-6  # seconds of a small kernel
_MEMORY_BANDWIDTH = 1.5e12  # bytes per second between a device and its own memory

Routed = Literal["broadcast", "reduce_add"]


class _Cost(NamedTuple):
    """For a bucket: seconds on the devices, seconds until the next bucket may follow, launches, bytes of a copy."""

    seconds: float
    until_next: float
    launches: int
    copied: float


def fastest(work: Routed, number: int, nbytes: int, links: Links, widened: bool = False) -> str:
    """The route that takes the least time; the simpler one if two routes take the same.

    ``number``: how many distinct devices. ``nbytes``: the size of a bucket. ``widened``: True for 16-bit floats.
    """
    if number <= 2:
        return "star"
    routes = ["star", "tree", "chain"] if work == "broadcast" else ["star", "chain"]
    if links.is_all_to_all and work == "reduce_add":
        routes.append("shards")
    return min(routes, key=lambda route: time_of(work, route, number, nbytes, links, widened))


def pieces(work: Routed, number: int, nbytes: int, links: Links, widened: bool = False) -> int:
    """The number of pieces with which a chain takes the least time. The arguments are those of `fastest`.

    With few pieces the last device waits long for the first one; with many the latency of each counts.
    """
    if number < 2:
        return 1
    counts = range(1, MOST_PIECES + 1)
    return min(counts, key=lambda count: time_of(work, "chain", number, nbytes, links, widened, count))


def time_of(
    work: Routed, route: str, number: int, nbytes: int, links: Links, widened: bool = False, count: int | None = None
) -> float:
    """Seconds by which routes are compared, with ``count`` pieces in a chain (default: the best number of pieces)."""
    if route == "chain" and count is None:
        count = pieces(work, number, nbytes, links, widened)
    bucket = nbytes * (2 if widened and route == "chain" else 1)
    cost = _COSTS[work, route](number, bucket, links, count or 1)
    launching = cost.launches * _LAUNCH_SECONDS[work]
    seconds = max(cost.seconds, launching + _copy(links, cost.copied))
    if work == "broadcast":
        return seconds + _FOLLOWING_BUCKETS * max(cost.until_next, launching)
    is_hidden = nbytes <= _HIDDEN_UP_TO_BYTES
    return max(launching, cost.until_next) + cost.seconds / _HIDDEN_DIVISOR if is_hidden else seconds


def _copy(links: Links, nbytes: float) -> float:
    return links.latency + nbytes / links.bandwidth


def _addition(nbytes: float) -> float:
    return _KERNEL_SECONDS + 3 * nbytes / _MEMORY_BANDWIDTH


def _broadcast_star(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = (n - 1) * _copy(links, s)
    return _Cost(seconds, seconds, n - 1, s)


def _broadcast_tree(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = (n - 1).bit_length() * _copy(links, s)
    return _Cost(seconds, seconds, n - 1, s)


def _broadcast_chain(n: int, s: float, links: Links, k: int) -> _Cost:
    step = _copy(links, s / k)
    return _Cost((n - 2 + k) * step, k * step, (n - 1) * k + _wait_launches(n, k), s / k)


def _sum_star(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = (n - 1) * (_copy(links, s) + _addition(s))
    return _Cost(seconds, seconds, 2 * (n - 1), s)


def _sum_chain(n: int, s: float, links: Links, k: int) -> _Cost:
    copy, addition = _copy(links, s / k), _addition(s / k)
    seconds = n * copy + (n - 1) * addition + (k - 1) * (copy + addition / 2)
    return _Cost(seconds, (k + 1) * (copy + addition / 2), (2 * n - 1) * k + _wait_launches(n, k), s / k)


def _sum_shards(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = 2 * (n - 1) * _copy(links, s / n) + (n - 1) * _addition(s / n)
    return _Cost(seconds, seconds, (n - 1) * (2 * n + 1) + n, s / n)


def _wait_launches(n: int, k: int) -> int:
    """Launches that cost as much as a second stream's two waits on each device: about one for each device."""
    return n if k > 1 else 0


_COSTS = {
    ("broadcast", "star"): _broadcast_star,
    ("broadcast", "tree"): _broadcast_tree,
    ("broadcast", "chain"): _broadcast_chain,
    ("reduce_add", "star"): _sum_star,
    ("reduce_add", "chain"): _sum_chain,
    ("reduce_add", "shards"): _sum_shards,
}
