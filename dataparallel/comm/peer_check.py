"""Whether copies from one accelerator straight to another arrive unharmed: tried once before they are trusted.

Where an IOMMU or PCIe access control gets between two GPUs, a copy returns without an error and brings garbage. So for
every ordered pair random bytes go from the host to the one, from there to the other, and back, and are compared. The
answer holds for the process; a forked child asks again. Who must not use a pair reads it here (``choice``, through its
caller); which way is used instead is not this room's business. ``DATAPARALLEL_PEER_CHECK=0`` turns checks off.

That the check finds a broken pair of GPUs needs CUDA and such a pair to be seen; simulated devices show everything but
that.
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

from dataparallel.environment import says_no
from dataparallel.forks import in_forked_child
from dataparallel.streams.current import streams_set

__all__ = ["VARIABLE", "Pair", "check_all", "is_on", "trusted"]

Pair: TypeAlias = "tuple[torch.device, torch.device]"

VARIABLE = "DATAPARALLEL_PEER_CHECK"
# 64 pages. As 32,768 numbers of eight bytes, which torch handles in the calling thread: a check takes a millisecond or
# two and waits for no core. Eight devices make 56 pairs.
CHECKED_BYTES = 2**18

_lock = threading.Lock()  # held by the thread that checks: the others wait for its answer
_answers: dict[Pair, bool] = {}
_streams: dict[torch.device, torch.Stream] = {}  # used with the lock held


def trusted(source: torch.device, target: torch.device) -> bool:
    """Whether copies from ``source`` to ``target`` can be trusted; the first call for a pair tries it.

    A failure warns once (``RuntimeWarning``). Always true within one device, and where the CPU is one of the two.
    """
    if source == target or not (is_on() and _can_fail(source) and _can_fail(target)):
        return True
    return _trusted(source, target)


def check_all(devices: Sequence[torch.device]) -> dict[Pair, bool]:
    """`trusted` for every ordered pair of distinct accelerators among ``devices``."""
    accelerators = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    checks = is_on() and all(map(_can_fail, accelerators))
    return {pair: not checks or _trusted(*pair) for pair in permutations(accelerators, 2)}


def _can_fail(device: torch.device) -> bool:
    """Not for the CPU, nor where a backend's device module says so: simulated devices' copies are the host's own.

    A check takes memory, which on these is counted to the byte.
    """
    return device.type != "cpu" and not getattr(torch.get_device_module(device.type), "copies_cannot_fail", False)


def is_on() -> bool:
    """Whether pairs are checked."""
    return not says_no(VARIABLE)


def _trusted(source: torch.device, target: torch.device) -> bool:
    pair = source, target
    answer = _answers.get(pair)
    if answer is not None:
        return answer
    with _lock:
        is_first = pair not in _answers
        if is_first:
            _answers[pair] = _arrives_unharmed(source, target)
        answer = _answers[pair]
    # The lock is free again: whoever shows the warning may ask here, and may make an error of it.
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
    """The copy that is checked: torch's own, from device to device."""
    target.copy_(source)


@torch.no_grad()
def _arrives_unharmed(source: torch.device, target: torch.device) -> bool:
    # Not from torch's generators: the user's random state stays where it is.
    data = torch.frombuffer(bytearray(os.urandom(CHECKED_BYTES)), dtype=torch.int64)
    # On streams of its own, so that the copies from and to the host, which block, wait for nobody's work. The copy
    # between the devices is ordered by torch against both.
    with streams_set({device: _stream(device) for device in (source, target)}):
        sent = data.to(source)
        # Every byte is wrong beforehand: one that does not arrive cannot look as if it had.
        arrived = data.bitwise_not().to(target)
        _copy(sent, arrived)
        return torch.equal(arrived.cpu(), data)


def _stream(device: torch.device) -> torch.Stream:
    if device not in _streams:
        _streams[device] = torch.Stream(device)
    return _streams[device]


@in_forked_child
def _forget() -> None:
    """In a forked child: another thread may have held the lock, and its devices are the parent's."""
    global _lock
    _lock = threading.Lock()
    _answers.clear()
    _streams.clear()
