"""What carries a call: asks what has to be known, has ``choice`` choose, and hands out the transport.

Only ``comm`` calls it, before each call between devices. Within one device it answers at once, unless its slots are
isolated: these count as devices.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.comm import nccl, peer_check, settings, topology
from dataparallel.comm.choice import Choice, Collective, choose
from dataparallel.comm.cupy import launch
from dataparallel.comm.cupy.transport import Kernels
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.routes import STAR, TorchCopies, Transport
from dataparallel.comm.settings import ROUTES, Settings, are_slots_isolated
from dataparallel.comm.sum_check import AddUp, wrong_sums
from dataparallel.comm.topology import Topology
from dataparallel.forks import in_forked_child

__all__ = ["choose_for", "transport_for"]

Spread: TypeAlias = "Callable[[Tensor, Sequence[Tensor]], None]"

_COMPARED = 2**16 + 1
"""Elements of the buffers by which a transport is compared with plain copies; no round number."""

_BY_ROUTE = {route: TorchCopies(route) for route in ROUTES}
_HOST = ThroughHost()
_KERNELS = Kernels()

_UNTRIED = "it has not been measured on GPUs yet, and is used only where it is asked for"

_dropped: dict[tuple[str, tuple[torch.device, ...]], str | None] = {}
"""Transports that have been compared on some devices: ``None``, or why they are not used there."""


def transport_for(work: Collective, devices: Sequence[torch.device], tensors: Sequence[Tensor]) -> Transport:
    """What carries ``tensors`` between ``devices``, where they are and where they go. In a sum, those of one slot.

    Raises:
        ValueError: a transport that was asked for can carry nothing between these devices, or an environment variable
            asks for something unknown.
    """
    if len({*devices}) < 2 and not (are_slots_isolated() and len(devices) > 1):
        return STAR
    nbytes = sum([tensor.numel() * tensor.itemsize for tensor in tensors])
    return _decided(work, tuple(devices), nbytes.bit_length(), len(tensors), settings.current(), peer_check.is_on())


@lru_cache(maxsize=4096)
def _decided(
    work: Collective, devices: tuple[torch.device, ...], bits: int, count: int, asked: Settings, check_peers: bool
) -> Transport:
    """Sizes count by powers of two, as thresholds do, so that a program has a few cases."""
    known, nbytes = topology.of(devices), 1 << max(0, bits - 1)
    checks = peer_check.check_all(known.distinct) if check_peers else {}
    untrusted = [pair for pair, is_trusted in checks.items() if not is_trusted]
    found = _available(asked.transport)
    choice = choose(work, known, nbytes, count, asked, found, untrusted)
    rival = _RIVALS.get(choice.transport)
    if rival is not None:
        problem = _compared(choice.transport, rival, known.distinct)
        if problem is not None:
            choice = choose(work, known, nbytes, count, asked, {**found, choice.transport: problem}, untrusted)
    if choice.transport == "nccl":
        return nccl.Nccl(sums=not asked.deterministic)
    if choice.transport == "cupy":
        return _KERNELS
    return _HOST if choice.transport == "host" else _BY_ROUTE[choice.route]


def choose_for(work: Collective, known: Topology, nbytes: int, count: int) -> Choice:
    """The choice as things are, without any check of data and without an import of CuPy.

    Raises:
        ValueError: as `transport_for`.
    """
    asked = settings.current()
    return choose(work, known, nbytes, count, asked, _available(asked.transport, try_import=False), ())


@cache
def _available(asked: str | None, try_import: bool = True) -> Mapping[str, str | None]:
    """For each transport ``None``, or why it is not available; nothing is asked of one that nobody has asked for."""
    found: dict[str, str | None] = {"copy": None, "host": None, "nccl": _UNTRIED, "cupy": _UNTRIED}
    if asked == "nccl":
        found[asked] = nccl.why_not()
    elif asked == "cupy":
        found[asked] = launch.why_not() if try_import else launch.why_not_installed()
    return found


def _compared(name: str, spread: Spread, devices: tuple[torch.device, ...]) -> str | None:
    """Why a transport that has brought other data than plain copies is not used between these devices.

    The first call compares, and warns of a transport that it drops.
    """
    key = name, devices
    if key not in _dropped:
        problem = _first_comparison(spread, devices)
        if problem is None and name in _ADDING:
            problem = wrong_sums(_ADDING[name], devices)
        _dropped[key] = problem
        if problem is not None:
            warnings.warn(
                f"the transport {name!r} is not used between {', '.join(map(str, devices))}: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )
    return _dropped[key]


@torch.no_grad()
def _first_comparison(spread: Spread, devices: tuple[torch.device, ...]) -> str | None:
    # Not from torch's generators: the user's random state stays where it is.
    data = torch.frombuffer(bytearray(os.urandom(_COMPARED)), dtype=torch.uint8)
    source = data.to(devices[0])
    buffers = [data.bitwise_not().to(device) for device in devices[1:]]
    try:
        spread(source, buffers)
        for buffer in buffers:
            if not torch.equal(buffer.cpu(), data):
                return f"it brought other data to {buffer.device} than plain copies do"
    except RuntimeError as error:
        return f"it has failed: {error}"
    return None


_RIVALS: dict[str, Spread] = {"nccl": nccl.Nccl(sums=False).spread, "cupy": _KERNELS.spread}
"""How transports other than torch's copies are tried before their first use."""


_ADDING: dict[str, AddUp] = {"cupy": _KERNELS.add_up}
"""Those of them whose sums have to be plain copies', bit for bit. NCCL's are in an order of its own."""


@in_forked_child
def _forget() -> None:
    _dropped.clear()
    _decided.cache_clear()
    _available.cache_clear()
