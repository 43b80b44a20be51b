"""`choose`: decides on transport and route of a call, by pure functions, so that a test can try any machine.

`transport_for` collects the facts of a call, and asks `choose`. Plain copies go along a star where there are two
devices or few bytes, and else along a chain: a star's root sends as many copies as there are other devices, a chain's
root one. A transport that the user asks for serves the calls that it supports; all other calls fall back to plain
copies, with a reason.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import permutations
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dataparallel.comm import kernels, nccl, settings
from dataparallel.comm.buckets import DEFAULT_CAP_BYTES
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.peer_kernels import why_not_by_default
from dataparallel.comm.peers import PEER_CHECK_VARIABLE, Pair, failed_pairs, peers_are_checked
from dataparallel.comm.routes import STAR, TorchCopies
from dataparallel.comm.settings import CommSettings
from dataparallel.comm.transport import Transport
from dataparallel.forks import in_forked_child

log = logging.getLogger("dataparallel")

Collective: TypeAlias = Literal["broadcast", "reduce_add", "gather", "scatter", "reduce_scatter"]

SUPPORTED: dict[str, tuple[Collective, ...]] = {
    "nccl": ("broadcast", "reduce_add", "reduce_scatter"),
    "cupy": ("broadcast", "reduce_add"),
}
"""The operations that *nccl* and *cupy* support between CUDA devices; *cupy* also gathers and scatters what is small.
Plain copies and the host support all.

In a call that these transports serve, plain copies still carry tensors that do not travel flat, sums in dtypes that a
transport cannot add, and *nccl*'s sums on a device that brings no term.
"""

STAR_BELOW_BYTES = 2**20
"""Below this a chain's many launches cost more than the copies that it saves the root."""

PLAIN = "plain tensor copies serve every backend"


class Choice(NamedTuple):
    """A transport, a route, and the reason in words. Only *copy* has routes; for other transports it is "star"."""

    transport: str
    route: str
    reason: str


def choose(
    work: Collective,
    devices: Sequence[torch.device],
    nbytes: int,
    settings: CommSettings,
    unavailable: str | None,
    failed_pairs: Collection[Pair],
) -> Choice:
    """The transport and the route for a call's tensors, of which each device receives or brings ``nbytes`` bytes.

    Args:
        devices: in slot order, with the source's or the destination's device. A device may be listed several times.
        settings: the user's. A route without a transport asks for plain copies, because only they have routes.
        unavailable: why the transport of ``settings`` is not available between these devices; ``None`` if it is.
        failed_pairs: ordered pairs that have failed their check: a call with both devices goes through the host.
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
        why_not = _why_not_supported(transport, work, devices, nbytes, settings)
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
    route, reason = _route(work, distinct, nbytes, settings)
    return Choice("copy", route, f"{preface}; {route}: {reason}")


def _route(work: Collective, distinct: Sequence[torch.device], nbytes: int, settings: CommSettings) -> tuple[str, str]:
    """The route of plain copies between distinct devices, and the reason."""
    if work not in ("broadcast", "reduce_add"):
        return "star", f"a {work} has no routes"
    if settings.route is not None:
        return settings.route, "it was asked for"
    if len(distinct) == 2:
        return "star", "two devices"
    if any(device.type == "cpu" for device in distinct):
        # The host waits for copies from and to the CPU, so a chain would wait at each piece.
        return "star", "the cpu is one of the devices"
    if nbytes < STAR_BELOW_BYTES:
        return "star", f"less than {STAR_BELOW_BYTES // 2**20} MiB"
    return "chain", f"{nbytes / 2**20:.1f} MiB between {len(distinct)} devices"


def _why_not_supported(
    transport: str, work: Collective, devices: Sequence[torch.device], nbytes: int, settings: CommSettings
) -> str | None:
    """Why the transport does not support this call, which then falls back to plain copies; ``None`` if it does."""
    if transport == "cupy" and work in ("gather", "scatter"):
        if nbytes >= STAR_BELOW_BYTES:
            return f"{transport} has no {work} of {STAR_BELOW_BYTES // 2**20} MiB and more"
    elif work not in SUPPORTED[transport]:
        return f"{transport} has no {work}"
    is_sum_of_nccl = transport == "nccl" and work in ("reduce_add", "reduce_scatter")
    if is_sum_of_nccl and settings.deterministic:
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
    if is_sum_of_nccl and twice is not None:
        return f"nccl takes each device once, and {twice} is listed more than once"
    return None


def _why_unavailable(distinct: Sequence[torch.device], unavailable: str | None, failed_pair: Pair | None) -> str | None:
    """Why a transport can do nothing between these devices; ``None`` if it can serve them."""
    other = next((device for device in distinct if device.type not in ("cuda", "cpu")), None)
    if other is not None:
        return f"it needs CUDA devices, and {other} is none"
    if unavailable is None and failed_pair is not None:
        return (
            f"copies from {failed_pair[0]} to {failed_pair[1]} have failed their check; use 'host', "
            f"or set {PEER_CHECK_VARIABLE}=0 if you know better"
        )
    return unavailable


def transport_for(
    work: Collective, devices: Sequence[torch.device], tensors: Sequence[Tensor], cap_bytes: int = sys.maxsize
) -> Transport:
    """The transport for a call between ``devices``.

    ``tensors``: the tensors that each device receives in a broadcast, or brings to a sum. They travel in buckets of
    ``cap_bytes``.
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
    problem = _problem_of(user_settings.transport, devices)
    choice = choose(work, devices, STAR_BELOW_BYTES if is_large else 0, user_settings, problem, failed)
    if choice.transport == "nccl":
        return nccl.Nccl(sums=not user_settings.deterministic)
    if choice.transport == "cupy":
        return Cupy()
    if choice.transport == "host":
        return ThroughHost()
    return TorchCopies(choice.route)


def why_no_tables(slots: Sequence[torch.device]) -> str | None:
    """Why kernels do not execute the tables of a call (``comm.tables``) on these slots, in words; ``None`` if they do.

    They serve if the user asks for them (``transport="cupy"``), and by default where ``comm.peer_kernels`` says so, or
    where the backend has a ``launch_rows`` of its own. Otherwise plain copies serve.
    """
    return _why_no_tables(tuple(slots), settings.current(), peers_are_checked())


@lru_cache(maxsize=256)
def _why_no_tables(slots: tuple[torch.device, ...], user_settings: CommSettings, check_peers: bool) -> str | None:
    distinct, asked = [*dict.fromkeys(slots)], user_settings.transport
    if len(distinct) < 2 or any(device.type == "cpu" for device in distinct):
        return "the kernels read peers, and there are not two accelerators"
    if asked not in (None, "cupy"):
        return f"{asked!r} was asked for"
    if check_peers and (failed := failed_pairs(distinct)):
        return f"copies from {failed[0][0]} to {failed[0][1]} have failed their check"
    if distinct[0].type != "cuda":
        if not hasattr(torch.get_device_module(distinct[0].type), "launch_rows"):
            return f"the kernels are for CUDA devices, and {distinct[0]} is none"
        return None
    problem = kernels.why_not(distinct)
    if problem is None:
        kernels.make_reachable(distinct)
        problem = why_not_by_default(distinct) if asked is None else None
    if problem is not None:
        log.info(
            "tensors of sharded models travel by plain copies between %s: %s", ", ".join(map(str, distinct)), problem
        )
    return problem


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
    return choose(work, devices, nbytes, user_settings, _problem_of(user_settings.transport), ())


@lru_cache(maxsize=256)
def _problem_of(name: str | None, devices: tuple[torch.device, ...] | None = None) -> str | None:
    """Why the transport of this name is not available; ``None`` if it is, or if the user names none.

    Without ``devices`` the function does not import CuPy, nor ask CUDA which devices are peers.
    """
    if name == "nccl":
        return nccl.why_not()
    if name == "cupy":
        return kernels.why_not(devices)
    return None


@in_forked_child
def forget() -> None:
    """Forgets all transports: a forked child, and a test that changes what is available, chooses again."""
    _cached_transport.cache_clear()
    _why_no_tables.cache_clear()
    _problem_of.cache_clear()
