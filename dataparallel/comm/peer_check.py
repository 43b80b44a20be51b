"""Checks once, for every ordered pair of accelerators, that direct copies bring the right data.

If an IOMMU or PCIe access control sits between two GPUs, a copy may return without an error and bring garbage.
``comm.choice`` decides what a broken pair uses instead. No test shows that the check finds one on real GPUs.
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

VARIABLE = "DATAPARALLEL_PEER_CHECK"
# 64 pages, as 32,768 numbers of eight bytes: so few that torch stays in the calling thread and waits for no other core.
# A check takes a millisecond or two; eight devices make 56 pairs.
CHECKED_BYTES = 2**18

_lock = threading.Lock()  # held by the thread that checks; other threads wait for its answer
_answers: dict[Pair, bool] = {}


def check_all(devices: Sequence[torch.device]) -> dict[Pair, bool]:
    """`trusted` for every ordered pair of distinct accelerators among ``devices``; all True if checks are off."""
    accelerators = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    checks = is_on() and all(map(_can_fail, accelerators))
    return {pair: not checks or trusted(*pair) for pair in permutations(accelerators, 2)}


def _can_fail(device: torch.device) -> bool:
    """False if the backend's device module says so.

    Simulated devices do: the host makes their copies, and a check would take memory that tests count to the byte.
    """
    return not getattr(torch.get_device_module(device.type), "copies_cannot_fail", False)


def is_on() -> bool:
    """True unless the environment turns checks off."""
    return not says_no(VARIABLE)


def trusted(source: torch.device, target: torch.device) -> bool:
    """True if copies between these two accelerators, in this direction, bring random bytes of the host as they were.

    The first call for a pair checks it. A failure warns once (``RuntimeWarning``).
    """
    pair = source, target
    answer = _answers.get(pair)
    if answer is not None:
        return answer
    with _lock:
        is_first = pair not in _answers
        if is_first:
            _answers[pair] = _arrives_unharmed(source, target)
        answer = _answers[pair]
    # Outside of the lock: a warning filter may call this room, and may turn the warning into an error.
    if is_first and not answer:
        warnings.warn(
            f"data copied from {source} to {target} did not arrive as it was sent: copies between the two go through "
            "the host instead, which is slower. An IOMMU or PCIe access control services (ACS) that redirect peer "
            f"copies are the usual cause; {VARIABLE}=0 turns this check off",
            RuntimeWarning,
            stacklevel=3,
        )
    return answer


def _copy(source: Tensor, target: Tensor) -> None:
    """The copy that is checked: torch's copy from device to device."""
    target.copy_(source)


@torch.no_grad()
def _arrives_unharmed(source: torch.device, target: torch.device) -> bool:
    # os.urandom leaves torch's generators, and so the user's random state, as they are.
    data = torch.frombuffer(bytearray(os.urandom(CHECKED_BYTES)), dtype=torch.int64)
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
    """Forgets all answers. In a forked child a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _answers.clear()
