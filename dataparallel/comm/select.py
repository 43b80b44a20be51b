"""`transport_for`: the transport that carries out a call. This file collects the facts, and ``choice`` decides.

A transport that not every machine has is compared with plain copies before its first use (``compare``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dataparallel.comm import kernels, nccl, settings
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.choice import Choice, Collective, choose, pieces
from dataparallel.comm.compare import forget as forget_comparisons
from dataparallel.comm.compare import why_unusable
from dataparallel.comm.cupy import Cupy
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.links import links_between
from dataparallel.comm.peers import failed_pairs, peers_are_checked
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.settings import Settings
from dataparallel.comm.transport import Transport, summed_in
from dataparallel.forks import in_forked_child

_HOST = ThroughHost()
_CUPY = Cupy()

_OPTIONAL: dict[str, Transport] = {"nccl": nccl.Nccl(sums=False), "cupy": _CUPY}
"""Transports that not every machine has, in the form that is compared with plain copies."""


def transport_for(
    work: Collective, devices: Sequence[torch.device], tensors: Sequence[Tensor], cap_bytes: int = sys.maxsize
) -> Transport:
    """The transport for a call between ``devices``.

    ``tensors``: the tensors that each device receives in a broadcast, or brings to a sum. They travel in buckets of
    ``cap_bytes``.

    Raises:
        ValueError: a transport that was asked for can do nothing between these devices, or an environment variable
            names an unknown transport or route.
    """
    if len({*devices}) < 2:
        return STAR
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    nbytes = max(min(sum(sizes), cap_bytes), *sizes, 0)  # a larger tensor is a bucket of its own
    widened = bool(tensors) and summed_in(tensors[0].dtype) != tensors[0].dtype
    return _cached_transport(work, tuple(devices), _rounded(nbytes), widened, settings.current(), peers_are_checked())


def _rounded(nbytes: int) -> int:
    """Rounds up to three binary digits and zeros, so that few different sizes fill the cache."""
    zeros = max(0, nbytes.bit_length() - 3)
    return -(-nbytes >> zeros) << zeros


@lru_cache(maxsize=4096)
def _cached_transport(
    work: Collective,
    devices: tuple[torch.device, ...],
    nbytes: int,
    widened: bool,
    user_settings: Settings,
    check_peers: bool,
) -> Transport:
    """The transport for ``nbytes`` bytes. ``widened``: sums are of 16-bit floats."""
    failed = failed_pairs(devices) if check_peers else []
    links = links_between(devices)
    problem = _why_unavailable(user_settings.transport, devices)
    choice = choose(work, devices, nbytes, user_settings, problem, failed, links, widened)
    if choice.transport in _OPTIONAL:
        problem = why_unusable(choice.transport, _OPTIONAL[choice.transport], tuple(dict.fromkeys(devices)))
        if problem is not None:
            choice = choose(work, devices, nbytes, user_settings, problem, failed, links, widened)
    if choice.transport == "nccl":
        return nccl.Nccl(sums=not user_settings.deterministic)
    if choice.transport == "cupy":
        return _CUPY
    if choice.transport == "host":
        return _HOST
    if choice.route == "chain":
        assert work in ("broadcast", "reduce_add")
        return TorchCopies("chain", pieces(work, len({*devices}), nbytes, links, widened))
    return TorchCopies(choice.route)


def choose_transport(
    devices: Sequence[torch.device], work: Collective = "broadcast", nbytes: int = DEFAULT_CAP_BYTES
) -> Choice:
    """The transport and the route that a bucket of ``nbytes`` bytes would take between ``devices``, and the reason.

    This function copies nothing, does not import CuPy, and does not ask CUDA which devices are peers.

    Raises:
        ValueError: a transport that was asked for can do nothing between these devices, or is unknown. Only a call
            finds out that two devices are not peers.
    """
    user_settings = settings.current()
    links = links_between(devices)
    return choose(work, devices, nbytes, user_settings, _why_unavailable(user_settings.transport), (), links)


@lru_cache(maxsize=256)
def _why_unavailable(name: str | None, devices: tuple[torch.device, ...] | None = None) -> str | None:
    """Why the transport of this name is not available; ``None`` if it is, or if the user names none.

    Without ``devices`` the function does not import CuPy, nor ask CUDA which devices are peers.
    """
    if name == "nccl":
        return nccl.why_not()
    if name == "cupy":
        return kernels.why_not_installed() if devices is None else kernels.why_not(devices)
    return None


@in_forked_child
def forget() -> None:
    """Forgets all transports: a forked child, and a test that changes what is available, chooses again."""
    _cached_transport.cache_clear()
    _why_unavailable.cache_clear()
    forget_comparisons()
