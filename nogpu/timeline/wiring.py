"""The links of common machines: a switch, links between pairs of devices, a PCIe tree, and everything through the host.

Each function returns a `Wiring`. For another machine build one by hand, or change the one that is nearest. A link has a
direction, and serves one copy at a time where nothing else is said. Names of links say the direction: ``0 out``,
``1 in``, ``0 to 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from nogpu.timeline.launches import HOST
from nogpu.timeline.machine import Path, Wiring

__all__ = ["mesh", "switch", "through_host", "tree"]


def switch(
    devices: int,
    *,
    bandwidth: float,
    latency: float,
    host_bandwidth: float,
    host_latency: float,
    copies: int = 1,
) -> Wiring:
    """All to all: each device has a port out and a port in, and a way of its own to and from the host.

    Args:
        devices: their number.
        bandwidth: of a port in one direction, in bytes per second.
        latency: of a copy between devices, in seconds.
        host_bandwidth: between a device and the host in one direction, in bytes per second.
        host_latency: of a copy to or from the host, in seconds.
        copies: how many copies a port serves at a time, each at the full bandwidth.
    """
    links, paths = _to_host(devices, host_bandwidth, host_latency)
    for device in range(devices):
        links[f"{device} out"] = links[f"{device} in"] = copies
    for a, b in permutations(range(devices), 2):
        paths[a, b] = Path(bandwidth, latency, (f"{a} out", f"{b} in"))
    return Wiring(links, paths)


def mesh(pairs: Mapping[tuple[int, int], float], otherwise: Wiring, *, latency: float, engines: int) -> Wiring:
    """Links between pairs of devices. Other pairs, and the host, are reached as in another wiring.

    Args:
        pairs: for each pair of joined devices the bandwidth in one direction, in bytes per second. ``(0, 1)`` stands
            for both directions.
        otherwise: the wiring that everything else takes.
        latency: of a copy over such a link, in seconds.
        engines: how many copies a device sends at a time over such links, and how many it receives.

    Raises:
        ValueError: if a pair names a device that `otherwise` does not have, or is given in both orders.
    """
    links, paths = dict(otherwise.links), dict(otherwise.paths)
    for device in range(otherwise.devices):
        links[f"{device} sends"] = links[f"{device} receives"] = engines
    for (a, b), bandwidth in pairs.items():
        if HOST in (a, b) or (a, b) not in paths:
            raise ValueError(f"pairs are of devices 0 to {otherwise.devices - 1}; got {(a, b)}")
        if (b, a) in pairs:
            raise ValueError(f"the pair of {a} and {b} is given twice: {(a, b)} stands for both directions")
        for ends in ((a, b), (b, a)):
            name = f"{ends[0]} to {ends[1]}"
            links[name] = 1
            paths[ends] = Path(bandwidth, latency, (f"{ends[0]} sends", name, f"{ends[1]} receives"))
    return Wiring(links, paths)


def tree(groups: Sequence[Sequence[int]], *, bandwidth: float, latency: float, uplink: float) -> Wiring:
    """A PCIe tree: the devices of a group share a switch, and the switches are joined through the host.

    A copy within a group occupies the sender's link up and the receiver's link down. A copy to another group or to the
    host also occupies the link of the switch, so that a group sends one such copy at a time.

    Args:
        groups: the devices of each switch, which together are 0, 1, 2 and so on.
        bandwidth: of the link of a device in one direction, in bytes per second.
        latency: of any copy, in seconds.
        uplink: the bandwidth of the link between a switch and the host in one direction, in bytes per second.

    Raises:
        ValueError: if a device is in no group or in two.
    """
    switch_of = {device: number for number, group in enumerate(groups) for device in group}
    if sorted(device for group in groups for device in group) != [*range(len(switch_of))]:
        raise ValueError(f"each of the devices 0, 1, 2 and so on is in one group; got {groups}")
    places = [*switch_of, *(f"switch {number}" for number in range(len(groups)))]
    links = {f"{place} {way}": 1 for place in places for way in ("up", "down")}
    up = {device: (f"{device} up", f"switch {number} up") for device, number in switch_of.items()}
    down = {device: (f"switch {number} down", f"{device} down") for device, number in switch_of.items()}
    narrow = min(bandwidth, uplink)
    paths = {}
    for a in switch_of:
        paths[a, HOST] = Path(narrow, latency, up[a])
        paths[HOST, a] = Path(narrow, latency, down[a])
    for a, b in permutations(switch_of, 2):
        together = switch_of[a] == switch_of[b]
        near = Path(bandwidth, latency, (up[a][0], down[b][1]))
        paths[a, b] = near if together else Path(narrow, latency, (*up[a], *down[b]))
    return Wiring(links, paths)


def through_host(devices: int, *, bandwidth: float, latency: float, copies: int | None = None) -> Wiring:
    """No link between devices: a copy occupies the sender's link to the host and the receiver's from the host.

    Devices are no peers: no kernel reads another one's memory.

    Args:
        devices: their number.
        bandwidth: between a device and the host in one direction, in bytes per second.
        latency: of a copy to or from the host, in seconds. A copy between devices takes twice as long to begin.
        copies: how many copies the host's memory serves at a time; without it any number.
    """
    links, paths = _to_host(devices, bandwidth, latency)
    for a, b in permutations(range(devices), 2):
        paths[a, b] = Path(bandwidth, 2 * latency, (f"{a} to host", f"host to {b}"), for_kernels=False)
    if copies is not None:
        links["host"] = copies
        paths = {ends: replace(path, links=(*path.links, "host")) for ends, path in paths.items()}
    return Wiring(links, paths)


def _to_host(devices: int, bandwidth: float, latency: float) -> tuple[dict[str, int], dict[tuple[int, int], Path]]:
    """For each device a link to the host and one from it, and the paths over them."""
    links, paths = {}, {}
    for device in range(devices):
        links[f"{device} to host"] = links[f"host to {device}"] = 1
        paths[device, HOST] = Path(bandwidth, latency, (f"{device} to host",))
        paths[HOST, device] = Path(bandwidth, latency, (f"host to {device}",))
    return links, paths
