"""`transport_for`: what carries the tensors of a call. `why_no_tables`: if kernels execute the tables of one.

Plain copies go along a star where there are two devices or few bytes, and else along a chain: a star's root sends as
many copies as there are other devices, a chain's root one. Kernels serve the calls that they support, if the user asks
for them; all other calls fall back to plain copies. A call between devices whose copies have failed their check goes
through the host.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dataparallel.comm import kernels, settings
from dataparallel.comm.host import ThroughHost
from dataparallel.comm.kernels import Cupy
from dataparallel.comm.peers import PEER_CHECK_VARIABLE, failed_pairs, peers_are_checked, why_no_kernels_by_default
from dataparallel.comm.routes import STAR, Chain
from dataparallel.comm.transport import Transport
from dataparallel.devices import CPU

log = logging.getLogger("dataparallel")

STAR_BELOW_BYTES = 2**20
"""Below this a chain's many launches cost more than the copies that it saves the root."""


def transport_for(
    work: str, devices: Iterable[torch.device], tensors: Sequence[Tensor], cap_bytes: int = sys.maxsize
) -> Transport:
    """The transport for a call between ``devices``: a broadcast, reduce_add, gather, scatter or reduce_scatter.

    ``tensors``: the tensors that each device receives in a broadcast, or brings to a sum. They travel in buckets of
    ``cap_bytes``.

    Raises:
        ValueError: kernels were asked for, and can do nothing between these devices; or no transport has that name.
    """
    distinct = tuple(dict.fromkeys(devices))
    if len(distinct) < 2:
        return STAR
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    nbytes = max(min(sum(sizes), cap_bytes), *sizes, 0)  # a larger tensor is a bucket of its own
    return _transport(work, distinct, nbytes >= STAR_BELOW_BYTES, settings.current(), peers_are_checked())


@lru_cache(maxsize=4096)
def _transport(
    work: str, devices: tuple[torch.device, ...], is_large: bool, asked: str | None, check_peers: bool
) -> Transport:
    if asked == "host":
        return ThroughHost()
    problem = _why_not_trusted(devices) if check_peers else None
    is_routed = work in ("broadcast", "reduce_add")
    # The host waits for copies from and to the CPU: kernels have no part in them, and a chain would wait at each piece.
    if CPU in devices:
        return ThroughHost() if problem else STAR
    if asked == "cupy" and (is_routed or not is_large):
        problem = kernels.why_not(devices) or problem
        if problem is not None:
            raise ValueError(
                f"transport 'cupy' was asked for and cannot serve this {work} between "
                f"{', '.join(map(str, devices))}: {problem}; use 'host' or 'copy'"
            )
        return Cupy()
    if problem is not None:
        return ThroughHost()
    return Chain() if is_routed and is_large and len(devices) > 2 else STAR


def _why_not_trusted(devices: Sequence[torch.device]) -> str | None:
    failed = failed_pairs(devices)
    if not failed:
        return None
    source, target = failed[0]
    return f"copies from {source} to {target} have failed their check, which {PEER_CHECK_VARIABLE}=0 turns off"


def why_no_tables(slots: Sequence[torch.device]) -> str | None:
    """Why kernels do not execute the tables of a call (``comm.tables``) on these slots, in words; ``None`` if they do.

    They serve if the user asks for them (``transport="cupy"``), and by default where ``comm.peers`` says so, or where
    the backend has a ``launch_rows`` of its own. Otherwise plain copies serve.
    """
    return _why_no_tables(tuple(dict.fromkeys(slots)), settings.current(), peers_are_checked())


@lru_cache(maxsize=256)
def _why_no_tables(devices: tuple[torch.device, ...], asked: str | None, check_peers: bool) -> str | None:
    if len(devices) < 2 or CPU in devices:
        return "the kernels read peers, and there are not two accelerators"
    if asked not in (None, "cupy"):
        return f"{asked!r} was asked for"
    problem = (_why_not_trusted(devices) if check_peers else None) or kernels.why_not(devices)
    if problem is None and devices[0].type == "cuda":
        kernels.make_reachable(devices)
        problem = why_no_kernels_by_default(devices) if asked is None else None
    if problem is not None:
        log.info(
            "tensors of sharded models travel by plain copies between %s: %s", ", ".join(map(str, devices)), problem
        )
    return problem
