"""How long a route takes, by formula: pure functions, so that a test can try any machine.

``comm.choice`` takes the fastest route, and ``comm.select`` the best number of pieces. This room knows numbers of
devices and bytes, no tensors.

A *route* is the order in which devices pass data on. Let n be the number of devices, s the bytes, k the number of
pieces, a the time until a copy begins to move data, b the bytes per second of a link, and t(x) = a + x/b the time of a
copy of x bytes. A device sends one copy at a time, and receives another one meanwhile. Adding x bytes takes d(x), which
is the latency of a kernel and three accesses to memory for each byte. Broadcasts:

- *star*: the root sends to each device: (n - 1) t(s).
- *tree*: a binomial tree. In each step, each device that has the data sends it to one that has not:
  ceil(log2(n)) t(s).
- *chain*: each device passes piece by piece to the next, and receives a piece while it sends the one before:
  (n - 2 + k) t(s/k). The next bucket of a model follows after k steps (``comm.duplex``).
- *shards*: the root sends to each device another n-th of the data, and then each device sends its part to all others:
  2 (n - 1) t(s/n).

Sums, always in slot order:

- *star*: the root receives and adds one after the other: (n - 1) (t(s) + d(s)).
- *chain*: each slot adds its own term to the partial sum that arrives, and the last one sends the sum to the root:
  n t(s/k) + (n - 1) d(s/k) for the first piece, and t(s/k) + d(s/k)/2 for each further one, because two pieces are
  under way on each device. Partial sums of 16-bit floats travel in 32 bits.
- *shards*: slot j receives the j-th part of all slots, adds in slot order, and the root collects the sums:
  2 (n - 1) t(s/n) + (n - 1) d(s/n). Terms travel in their own dtype, also 16-bit floats. In each of the first n - 1
  steps each device sends to another one, so every pair needs a way of its own: only where links are all-to-all.

The host launches one operation after the other, h seconds each. A route takes at least the time of its launches and of
its last copy.

Without a host, and with large buckets, the chain takes s/b for each of many broadcasts in a row, since no link passes a
byte twice: that is the least possible. Shards need almost 2 s/b for each, as the root sends each byte twice. For a
single broadcast, a chain of n pieces needs the time and the launches of shards, but no links between all pairs. So a
broadcast takes shards only if they are asked for.

Objectives differ. Weights travel bucket after bucket, each in a call of its own, so a broadcast is optimised for the
time of the first bucket and that of twelve more. Sums are hidden behind the backward pass, except the last ones, which
are small. So a sum is optimised for the time until the next one may follow and for its launches, because the host is
busy with these while it could launch the backward; its own time counts little. Only for a tensor that is larger than
any bucket its own time counts. There shards may win over a chain, because a chain has to be filled: 1.75 s/b for 8
devices, and a chain needs 8 pieces and as many launches for 1.88 s/b.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from dataparallel.comm.links import Links

__all__ = ["MOST_PIECES", "Routed", "fastest", "pieces", "time_of"]

MOST_PIECES = 16
"""Pieces of a chain. More would save less than a tenth of the time, and each is one more launch on every device."""

_FOLLOWING = 12
"""Buckets that follow another one: twelve of 25 MiB are a model of some hundred megabytes."""

_HIDDEN = 8
"""The time of a sum is divided by this number when routes are compared, because the backward pass and other sums go on
meanwhile. The time until the next sum may follow counts in full, or that of the host's launches if it is longer."""

_LARGE = 25 * 2**20
"""Bytes. A bucket of more is one tensor, most often an embedding, whose gradient comes last: its sum is not hidden."""

_HOST = {"broadcast": 7e-6, "reduce_add": 5e-6}
"""Seconds of the host for each launch: of a Python thread, and of a thread of the autograd engine, which makes sums."""

_KERNEL = 3e-6  # seconds of a small kernel
_MEMORY = 1.5e12  # bytes per second between a device and its own memory

Routed = Literal["broadcast", "reduce_add"]


class _Cost(NamedTuple):
    """Of a bucket: seconds of the devices, seconds until the next bucket may follow, launches, bytes of a copy."""

    seconds: float
    until_next: float
    launches: int
    copied: float


def fastest(work: Routed, number: int, nbytes: int, links: Links, widened: bool = False) -> str:
    """The route that takes the least time; of two that take the same, the simpler one.

    Args:
        work: the operation.
        number: of distinct devices, two or more.
        nbytes: of a bucket, that each device receives in a broadcast, or brings to a sum.
        links: between the devices.
        widened: True for a sum of 16-bit floats.
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
    launching = cost.launches * _HOST[work]
    one = max(cost.seconds, launching + _copy(links, cost.copied))
    if work == "reduce_add":
        return max(launching, cost.until_next) + cost.seconds / _HIDDEN if nbytes <= _LARGE else one
    return one + _FOLLOWING * max(cost.until_next, launching)


def _copy(links: Links, nbytes: float) -> float:
    return links.latency + nbytes / links.bandwidth


def _addition(nbytes: float) -> float:
    return _KERNEL + 3 * nbytes / _MEMORY


def _broadcast_star(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = (n - 1) * _copy(links, s)
    return _Cost(seconds, seconds, n - 1, s)


def _broadcast_tree(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = (n - 1).bit_length() * _copy(links, s)
    return _Cost(seconds, seconds, n - 1, s)


def _broadcast_chain(n: int, s: float, links: Links, k: int) -> _Cost:
    step = _copy(links, s / k)
    return _Cost((n - 2 + k) * step, k * step, (n - 1) * k + _waits(n, k), s / k)


def _broadcast_shards(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = 2 * (n - 1) * _copy(links, s / n)
    return _Cost(seconds, seconds, (n - 1) * n + n, s / n)


def _sum_star(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = (n - 1) * (_copy(links, s) + _addition(s))
    return _Cost(seconds, seconds, 2 * (n - 1), s)


def _sum_chain(n: int, s: float, links: Links, k: int) -> _Cost:
    copy, addition = _copy(links, s / k), _addition(s / k)
    seconds = n * copy + (n - 1) * addition + (k - 1) * (copy + addition / 2)
    return _Cost(seconds, (k + 1) * (copy + addition / 2), (2 * n - 1) * k + _waits(n, k), s / k)


def _sum_shards(n: int, s: float, links: Links, k: int) -> _Cost:
    seconds = 2 * (n - 1) * _copy(links, s / n) + (n - 1) * _addition(s / n)
    return _Cost(seconds, seconds, (n - 1) * (2 * n + 1) + n, s / n)


def _waits(n: int, k: int) -> int:
    """The two waits on each device with which a second stream begins and ends cost about as much as a launch."""
    return n if k > 1 else 0


_COSTS = {
    ("broadcast", "star"): _broadcast_star,
    ("broadcast", "tree"): _broadcast_tree,
    ("broadcast", "chain"): _broadcast_chain,
    ("broadcast", "shards"): _broadcast_shards,
    ("reduce_add", "star"): _sum_star,
    ("reduce_add", "chain"): _sum_chain,
    ("reduce_add", "shards"): _sum_shards,
}
