"""`transport_for`: the transport that carries out a call. This file collects the facts, and ``choice`` decides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dataparallel.comm import kernels, nccl, settings
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.choice import STAR_BELOW_BYTES, Choice, Collective, choose
from dataparallel.comm.cupy import Cupy
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.peers import failed_pairs, peers_are_checked
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.settings import CommSettings
from dataparallel.comm.transport import Transport
from dataparallel.forks import in_forked_child

_HOST = ThroughHost()
_CUPY = Cupy()


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
    return _cached_transport(work, tuple(devices), nbytes >= STAR_BELOW_BYTES, settings.current(), peers_are_checked())


@lru_cache(maxsize=4096)
def _cached_transport(
    work: Collective, devices: tuple[torch.device, ...], is_large: bool, user_settings: CommSettings, check_peers: bool
) -> Transport:
    failed = failed_pairs(devices) if check_peers else []
    problem = _why_unavailable(user_settings.transport, devices)
    choice = choose(work, devices, STAR_BELOW_BYTES if is_large else 0, user_settings, problem, failed)
    if choice.transport == "nccl":
        return nccl.Nccl(sums=not user_settings.deterministic)
    if choice.transport == "cupy":
        return _CUPY
    return _HOST if choice.transport == "host" else TorchCopies(choice.route)


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
    return choose(work, devices, nbytes, user_settings, _why_unavailable(user_settings.transport), ())


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
