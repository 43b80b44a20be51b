"""Selects the transport of a call.

It collects the facts, lets ``choice`` decide, and compares a transport with plain copies before its first use. That
comparison is the only data that it moves. ``comm`` calls `transport_for` before every call between devices, and the
report calls `choose_transport`. Within one device plain copies do.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dataparallel.comm import nccl, peer_check, settings, times
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.choice import Choice, Collective, choose
from dataparallel.comm.cupy import launch
from dataparallel.comm.cupy.transport import Kernels
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.links import links_between
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.settings import Settings
from dataparallel.comm.sum_check import wrong_sums
from dataparallel.comm.transport import Transport, summed_in
from dataparallel.forks import in_forked_child

__all__ = ["choose_transport", "forget", "transport_for", "why_dropped"]

_CHECKED_BYTES = 2**16 + 1
"""The size of the buffers by which a transport is compared with plain copies; no round number."""

_TYPICAL_BYTES = DEFAULT_CAP_BYTES
"""The bytes in a typical bucket of parameters."""

_HOST = ThroughHost()
_KERNELS = Kernels()

_COMPARED: dict[str, Transport] = {"nccl": nccl.Nccl(sums=False), "cupy": _KERNELS}
"""The transports that are compared with plain copies before their first use."""

_ADDS_IN_SLOT_ORDER = frozenset({"cupy"})
"""Those of them whose sums must have the bits of plain copies. NCCL adds in an order of its own."""

_comparisons: dict[tuple[str, tuple[torch.device, ...]], str | None] = {}
"""For each transport and devices that have been compared: ``None``, or why the transport is not used there."""


def transport_for(
    work: Collective, devices: Sequence[torch.device], tensors: Sequence[Tensor], cap_bytes: int = sys.maxsize
) -> Transport:
    """The transport for a call.

    Args:
        work: the operation.
        devices: where the tensors are and where they go.
        tensors: what each device receives in a broadcast, or brings to a sum.
        cap_bytes: size of the buckets in which they travel.

    Raises:
        ValueError: a transport that was asked for can do nothing between these devices, or an environment variable
            names an unknown transport or route.
    """
    if len({*devices}) < 2:
        return STAR
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    nbytes = max(min(sum(sizes), cap_bytes), *sizes, 0)  # a larger tensor is a bucket of its own
    asked, check_peers = settings.current(), peer_check.is_on()
    widened = bool(tensors) and summed_in(tensors[0].dtype) != tensors[0].dtype
    return _select(work, tuple(devices), _rounded(nbytes), widened, asked, check_peers)


def _rounded(nbytes: int) -> int:
    """Three binary digits and zeros, rounded up, so that a program has few different calls."""
    zeros = max(0, nbytes.bit_length() - 3)
    return -(-nbytes >> zeros) << zeros


@lru_cache(maxsize=4096)
def _select(
    work: Collective, devices: tuple[torch.device, ...], nbytes: int, widened: bool, asked: Settings, check_peers: bool
) -> Transport:
    """The transport for ``nbytes`` bytes. ``widened``: sums are of 16-bit floats."""
    checks = peer_check.check_all(devices) if check_peers else {}
    untrusted = [pair for pair, is_trusted in checks.items() if not is_trusted]
    links = links_between(devices)
    choice = choose(work, devices, nbytes, asked, _why_unavailable(asked.transport, devices), untrusted, links, widened)
    if choice.transport in _COMPARED:
        problem = why_dropped(choice.transport, _COMPARED[choice.transport], tuple(dict.fromkeys(devices)))
        if problem is not None:
            choice = choose(work, devices, nbytes, asked, problem, untrusted, links, widened)
    if choice.transport == "nccl":
        return nccl.Nccl(sums=not asked.deterministic)
    if choice.transport == "cupy":
        return _KERNELS
    if choice.transport == "host":
        return _HOST
    if choice.route == "chain":
        assert work in ("broadcast", "reduce_add")
        return TorchCopies("chain", times.pieces(work, len({*devices}), nbytes, links, widened))
    return TorchCopies(choice.route)


def choose_transport(devices: Sequence[torch.device], work: Collective = "broadcast") -> Choice:
    """The transport and the route that a bucket of parameters would take between ``devices``, and the reason.

    Nothing is copied for it, CuPy is not imported, and CUDA is not asked which devices are peers.

    Args:
        devices: accelerators, or the CPU several times.
        work: the operation.

    Raises:
        ValueError: a transport that was asked for can do nothing between these devices, or is unknown. Only a call
            finds out that two devices are not peers.
    """
    asked = settings.current()
    links = links_between(devices)
    return choose(work, devices, _TYPICAL_BYTES, asked, _why_unavailable(asked.transport), (), links)


@lru_cache(maxsize=256)
def _why_unavailable(asked: str | None, devices: tuple[torch.device, ...] | None = None) -> str | None:
    """Why the transport that was asked for is not available; ``None`` if it is.

    Without ``devices`` CuPy is not imported, and CUDA is not asked which devices are peers.
    """
    if asked == "nccl":
        return nccl.why_not()
    if asked == "cupy":
        return launch.why_not_installed() if devices is None else launch.why_not(devices)
    return None


def why_dropped(name: str, transport: Transport, devices: tuple[torch.device, ...]) -> str | None:
    """How the transport's results differ from those of plain copies between these devices; ``None`` if they do not.

    The first call for a transport and devices compares, and warns (``RuntimeWarning``) if the results differ.
    """
    key = name, devices
    if key not in _comparisons:
        problem = _wrong_copies(transport, devices)
        if problem is None and name in _ADDS_IN_SLOT_ORDER:
            problem = wrong_sums(transport.add_up, devices)
        _comparisons[key] = problem
        if problem is not None:
            warnings.warn(
                f"the transport {name!r} is not used between {', '.join(map(str, devices))}: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )
    return _comparisons[key]


@torch.no_grad()
def _wrong_copies(transport: Transport, devices: tuple[torch.device, ...]) -> str | None:
    # os.urandom leaves torch's generators, and so the user's random state, as they are.
    data = torch.frombuffer(bytearray(os.urandom(_CHECKED_BYTES)), dtype=torch.uint8)
    source = data.to(devices[0])
    buffers = [data.bitwise_not().to(device) for device in devices[1:]]
    try:
        transport.broadcast_flat(source, buffers)
        for buffer in buffers:
            if not torch.equal(buffer.cpu(), data):
                return f"it brought other data to {buffer.device} than plain copies do"
    except RuntimeError as error:
        return f"it has failed: {error}"
    return None


@in_forked_child
def forget() -> None:
    """Forgets all answers: a forked child, and a test that changes what is available, asks again."""
    _comparisons.clear()
    _select.cache_clear()
    _why_unavailable.cache_clear()
