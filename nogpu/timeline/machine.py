"""What a machine is: how fast its devices compute, what a launch costs the host, and which links a copy occupies.

``wiring`` builds the links of common machines and ``presets`` has published machines. ``schedule`` computes with one.
Units are seconds, bytes and bytes per second, FLOPs and FLOPs per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any

from nogpu.timeline.launches import HOST, Launch


def _check(what: str, value: object, *, zero: bool) -> None:
    """Raises unless `value` is a cost (0 or more, and finite) or, without `zero`, a rate (more than 0, or infinite)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} is a number; got {value!r}")
    if math.isnan(value) or value < 0 or (value == 0 and not zero) or (math.isinf(value) and zero):
        raise ValueError(f"{what} is {'0 or more, and finite' if zero else 'more than 0'}; got {value!r}")


@dataclass(frozen=True)
class Host:
    """What a launch costs the host.

    A launch of a Python thread holds the interpreter lock for `lock` seconds and keeps its own thread busy for `rest`
    more. A launch of a thread of the autograd engine takes `backward` seconds and holds no lock. With `measured`, a
    launch costs `measured` times the host seconds that were recorded for it instead, for Python threads all of them
    under the lock.

    With `cores` Python has no lock. A launch of a Python thread then keeps its thread busy for as long, and so many of
    these threads are busy at a time.

    A captured graph is one launch, however many kernels it has: it takes `graph` seconds in place of `rest` or
    `backward`. So does a kernel that reads or writes other devices' memory, for which Python makes a table.

    Attributes:
        lock: seconds.
        rest: seconds.
        backward: seconds.
        measured: a factor, or None.
        cores: how many Python threads run at a time; None where Python has a lock.
        graph: seconds.

    Raises:
        TypeError: for anything but numbers, and for `cores` that are no int.
        ValueError: for a negative or infinite number, and for less than one core.
    """

    lock: float = 3e-6
    rest: float = 4e-6
    backward: float = 5e-6
    measured: float | None = None
    cores: int | None = None
    graph: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("lock", "rest", "backward", "graph"):
            _check(f"Host.{name}", getattr(self, name), zero=True)
        if self.measured is not None:
            _check("Host.measured", self.measured, zero=True)
        if self.cores is not None:
            if isinstance(self.cores, bool) or not isinstance(self.cores, int):
                raise TypeError(f"Host.cores is a number of cores, an int; got {self.cores!r}")
            if self.cores < 1:
                raise ValueError(f"Host.cores is 1 or more; got {self.cores}")

    @classmethod
    def free(cls) -> Host:
        """A host whose launches cost nothing."""
        return cls(0.0, 0.0, 0.0, graph=0.0)

    def without_lock(self, cores: int) -> Host:
        """The same host with a free-threaded Python, whose launches take as long."""
        return replace(self, cores=cores)

    def cost(self, launch: Launch) -> tuple[float, float]:
        """Seconds under the interpreter lock, or on a core where there is none, and seconds after it."""
        locked, rest = self._cost(launch)
        return (locked, rest) if self.cores is None or launch.in_backward else (locked + rest, 0.0)

    def _cost(self, launch: Launch) -> tuple[float, float]:
        if not launch.is_call:
            return 0.0, 0.0
        if self.measured is not None:
            seconds = self.measured * launch.host_seconds
            return (0.0, seconds) if launch.in_backward else (seconds, 0.0)
        is_long = launch.graph is not None or bool(launch.peers)
        if launch.in_backward:
            return 0.0, self.graph if is_long else self.backward
        return self.lock, self.graph if is_long else self.rest


@dataclass(frozen=True)
class Path:
    """How data get from one place to another.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds until the first byte is there.
        links: the links that a copy occupies from its start to its end.
        for_kernels: whether a kernel at one end reads and writes memory at the other. Two devices are peers then.

    Raises:
        TypeError: for anything but numbers and names.
        ValueError: if the bandwidth is not more than 0, the latency is negative or infinite, or a link is named twice.
    """

    bandwidth: float
    latency: float
    links: tuple[str, ...]
    for_kernels: bool = True

    def __post_init__(self) -> None:
        _check("Path.bandwidth", self.bandwidth, zero=False)
        _check("Path.latency", self.latency, zero=True)
        if not isinstance(self.links, tuple) or not all(isinstance(link, str) for link in self.links):
            raise TypeError(f"Path.links is a tuple of names; got {self.links!r}")
        if len(set(self.links)) < len(self.links):
            raise ValueError(f"a path occupies a link once; got {self.links}")


@dataclass(frozen=True)
class Wiring:
    """The links of a machine, and the path between every two places.

    Attributes:
        links: for each link, how many copies it serves at a time. A copy engine is a link too.
        paths: for each ordered pair of places the path. A place is the index of a device, or `HOST`.

    Raises:
        TypeError: if a capacity is not an int, or a path not a `Path`.
        ValueError: if a capacity is less than 1, a path names a link that is not in `links`, leads from a place to
            itself, or is missing.
    """

    links: Mapping[str, int]
    paths: Mapping[tuple[int, int], Path]

    def __post_init__(self) -> None:
        for link, capacity in self.links.items():
            if isinstance(capacity, bool) or not isinstance(capacity, int):
                raise TypeError(f"link {link!r}: the number of copies at a time is an int; got {capacity!r}")
            if capacity < 1:
                raise ValueError(f"link {link!r}: it serves 1 or more copies at a time; got {capacity}")
        for ends, path in self.paths.items():
            if not isinstance(path, Path):
                raise TypeError(f"from {ends[0]} to {ends[1]}: this takes a Path; got {path!r}")
            if unknown := [link for link in path.links if link not in self.links]:
                raise ValueError(f"from {ends[0]} to {ends[1]}: no links named {unknown}; there are {[*self.links]}")
        needed = {*permutations([HOST, *range(self.devices)], 2)}
        if missing := sorted(needed - self.paths.keys()):
            raise ValueError(f"no path from {missing[0][0]} to {missing[0][1]}; {HOST} is the host")
        if wrong := sorted(self.paths.keys() - needed):
            raise ValueError(f"a path leads from a device, or {HOST} for the host, to another place; got {wrong[0]}")
        # Copies: what the caller does to its own dictionaries afterwards changes no machine.
        object.__setattr__(self, "links", dict(self.links))
        object.__setattr__(self, "paths", dict(self.paths))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 + max((place for ends in self.paths for place in ends), default=HOST)


@dataclass(frozen=True)
class Machine:
    """A host, a number of equal devices, and what joins them.

    Attributes:
        name: for tables and pictures.
        devices: the number of devices.
        flops: peak FLOPs per second for each dtype, by the name of the dtype: ``{"float32": 19.5e12}``.
        memory_bandwidth: bytes per second between a device and its memory.
        kernel_latency: seconds that every kernel takes besides.
        wiring: links and paths; functions of ``wiring`` build those of common machines.
        host: what launches cost.
        peer_kernels: what a kernel that reads or writes other devices' memory gets of the bandwidth of a copy, from
            more than 0 to 1.
        beside_peer_kernels: how much more time the other kernels of a device take while such a kernel runs there, as a
            share: 0.2 is 1.2 times as long.

    Raises:
        TypeError: if an attribute has another type.
        ValueError: if a number makes no sense, or `wiring` is for another number of devices.
    """

    name: str
    devices: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    kernel_latency: float
    wiring: Wiring
    host: Host = Host()
    peer_kernels: float = 1.0
    beside_peer_kernels: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or not isinstance(self.devices, int):
            raise TypeError(f"Machine.devices is a number of devices, an int; got {self.devices!r}")
        if self.devices < 1:
            raise ValueError(f"a machine has 1 or more devices; got {self.devices}")
        if not isinstance(self.flops, Mapping):
            raise TypeError(
                f"Machine.flops has a rate for each dtype, such as {{'float32': 19.5e12}}; got {self.flops!r}"
            )
        for dtype, rate in self.flops.items():
            _check(f"Machine.flops[{dtype!r}]", rate, zero=False)
        _check("Machine.memory_bandwidth", self.memory_bandwidth, zero=False)
        _check("Machine.kernel_latency", self.kernel_latency, zero=True)
        _check("Machine.peer_kernels", self.peer_kernels, zero=False)
        if self.peer_kernels > 1:
            raise ValueError(
                f"Machine.peer_kernels is a share of a copy's bandwidth, at most 1; got {self.peer_kernels}"
            )
        _check("Machine.beside_peer_kernels", self.beside_peer_kernels, zero=True)
        for name, kind in (("host", Host), ("wiring", Wiring)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"Machine.{name} is a {kind.__name__}; got {getattr(self, name)!r}")
        if self.wiring.devices != self.devices:
            raise ValueError(f"{self.name} has {self.devices} devices, its wiring {self.wiring.devices}")
        object.__setattr__(self, "flops", dict(self.flops))

    def with_(self, **changes: Any) -> Machine:
        """The same machine with other attributes: ``machine.with_(kernel_latency=0.0)``.

        Raises:
            TypeError: for a name that is not an attribute.
        """
        names = [field.name for field in fields(self)]
        if unknown := changes.keys() - {*names}:
            raise TypeError(f"a Machine has no {sorted(unknown)}; it has {names}")
        return replace(self, **changes)

    def with_free_host(self) -> Machine:
        """The same machine where launches cost the host nothing."""
        return self.with_(host=Host.free())
