"""`failed_pairs`: copies random data once between each two accelerators, and finds pairs where data arrives changed.

If an IOMMU or PCIe access control sits between two GPUs, a copy may return without an error and bring garbage. So each
ordered pair is checked before its first use; ``comm.transport_choice`` sends calls with a failed pair through the host.
No test shows that the check finds a broken pair of real GPUs.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from itertools import permutations
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.comm.streams.current import kept_stream, streams_set
from dataparallel.environment import says_no
from dataparallel.forks import in_forked_child

Pair: TypeAlias = "tuple[torch.device, torch.device]"

PEER_CHECK_VARIABLE = "DATAPARALLEL_PEER_CHECK"
# 64 pages, as 32,768 numbers of eight bytes: so few that torch stays in the calling thread and waits for no other core.
# A check takes a millisecond or two; eight devices make 56 pairs.
_CHECKED_BYTES = 2**18

_lock = threading.Lock()  # held by the thread that checks a pair; other threads wait for its result
_results: dict[Pair, bool] = {}


def peers_are_checked() -> bool:
    """True unless the environment turns checks off."""
    return not says_no(PEER_CHECK_VARIABLE)


def failed_pairs(devices: Sequence[torch.device]) -> list[Pair]:
    """The ordered pairs of distinct accelerators among ``devices`` that fail their check; none if checks are off."""
    accelerators = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    modules = [torch.get_device_module(device.type) for device in accelerators]
    # Simulated devices say that the host makes their copies. A check would take memory that tests count to the byte.
    if not peers_are_checked() or any(getattr(module, "copies_cannot_fail", False) for module in modules):
        return []
    return [pair for pair in permutations(accelerators, 2) if not passes_check(*pair)]


def passes_check(source: torch.device, target: torch.device) -> bool:
    """True if a copy of random bytes from ``source`` to ``target`` arrives unchanged.

    Only the first call for a pair copies. It warns (``RuntimeWarning``) if the pair fails.
    """
    pair = source, target
    with _lock:
        is_first = pair not in _results
        if is_first:
            _results[pair] = _arrives_unchanged(source, target)
        result = _results[pair]
    # Outside of the lock: what shows the warning may run user code that asks for a check, or raise it as an error.
    if is_first and not result:
        warnings.warn(
            f"data copied from {source} to {target} did not arrive as it was sent: copies between the two go through "
            "the host instead, which is slower. An IOMMU or PCIe access control services (ACS) that redirect peer "
            f"copies are the usual cause; {PEER_CHECK_VARIABLE}=0 turns this check off",
            RuntimeWarning,
            stacklevel=3,
        )
    return result


def _copy(source: Tensor, target: Tensor) -> None:
    """torch's copy from device to device, which is under test."""
    target.copy_(source)


@torch.no_grad()
def _arrives_unchanged(source: torch.device, target: torch.device) -> bool:
    # os.urandom leaves torch's generators, and so the user's random state, as they are.
    data = torch.frombuffer(bytearray(os.urandom(_CHECKED_BYTES)), dtype=torch.int64)
    # On separate streams, so that the blocking copies from and to the host wait for no other work. torch orders the
    # copy between the devices against both streams.
    with streams_set({device: kept_stream(device, "peers are checked") for device in (source, target)}):
        sent = data.to(source)
        # Every byte is wrong beforehand, so that a byte that does not arrive is noticed.
        arrived = data.bitwise_not().to(target)
        _copy(sent, arrived)
        return torch.equal(arrived.cpu(), data)


@in_forked_child
def forget() -> None:
    """Forgets all results: a test that changes what copies do checks again.

    In a forked child a thread of the parent may have held the lock.
    """
    global _lock
    _lock = threading.Lock()
    _results.clear()
