"""What is known of the links between accelerators: which send at the same time, how fast, and if data arrives unharmed.

Nothing is measured. A device module may say ``links_are_all_to_all = True``; for CUDA devices NVML is asked. Whoever
knows better names a route (`comm.using`). ``comm.choice`` decides what a pair uses whose copies are broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dataparallel.comm.streams.current import kept_stream, streams_set
from dataparallel.environment import says_no
from dataparallel.forks import in_forked_child


class Links(NamedTuple):
    """What copies between accelerators share: ``latency`` in seconds, ``bandwidth`` in bytes per second and direction.

    ``is_all_to_all``: every pair of devices has a way of its own, so that all can send at the same time, each to
    another one. If False, copies may share links: a PCIe tree, the host, or an unknown machine.
    """

    is_all_to_all: bool
    latency: float
    bandwidth: float


SHARED = Links(False, 10e-6, 25e9)
"""PCIe 4.0 with 16 lanes."""

ALL_TO_ALL = Links(True, 9e-6, 225e9)
"""NVLink of an A100: three quarters of the 300 GB/s in each direction that its data sheet names."""

_NVLINK, _OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK and NVML_P2P_STATUS_OK


def links_between(devices: Sequence[torch.device]) -> Links:
    """The links between the accelerators among ``devices``. Unknown links are `SHARED`."""
    types = {device.type for device in devices if device.type != "cpu"}
    return ALL_TO_ALL if len(types) == 1 and _are_all_to_all(*types) else SHARED


@cache
def _are_all_to_all(device_type: str) -> bool:
    if device_type == "cuda":
        return importlib.util.find_spec("pynvml") is not None and nvlink_joins_all(importlib.import_module("pynvml"))
    return getattr(torch.get_device_module(device_type), "links_are_all_to_all", False) is True


def nvlink_joins_all(nvml: Any) -> bool:
    """True if every GPU of the machine reaches every other one over NVLink; False if NVML does not tell.

    All GPUs are asked about, not only those of a call, because NVML's numbers may differ from CUDA's.
    """
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            pairs = permutations(handles, 2)
            return all(nvml.nvmlDeviceGetP2PStatus(one, other, _NVLINK) == _OK for one, other in pairs)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return False


# ---- the check of peers ----------------------------------------------------------------------------------------------

# If an IOMMU or PCIe access control sits between two GPUs, a copy may return without an error and bring garbage. So
# each ordered pair is checked once, before it is used. No test shows that the check finds a broken pair on real GPUs.

Pair: TypeAlias = "tuple[torch.device, torch.device]"

PEER_CHECK_VARIABLE = "DATAPARALLEL_PEER_CHECK"
# 64 pages, as 32,768 numbers of eight bytes: so few that torch stays in the calling thread and waits for no other core.
# A check takes a millisecond or two; eight devices make 56 pairs.
_CHECKED_BYTES = 2**18

_lock = threading.Lock()  # held by the thread that checks; other threads wait for its answer
_answers: dict[Pair, bool] = {}


def peers_are_checked() -> bool:
    """True unless the environment turns checks off."""
    return not says_no(PEER_CHECK_VARIABLE)


def untrusted_pairs(devices: Sequence[torch.device]) -> list[Pair]:
    """The ordered pairs of distinct accelerators among ``devices`` that are not `trusted`; none if checks are off."""
    accelerators = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    if not peers_are_checked() or not all(map(_copies_can_fail, accelerators)):
        return []
    return [pair for pair in permutations(accelerators, 2) if not trusted(*pair)]


def _copies_can_fail(device: torch.device) -> bool:
    """False if the backend's device module says so.

    Simulated devices do: the host makes their copies, and a check would take memory that tests count to the byte.
    """
    return not getattr(torch.get_device_module(device.type), "copies_cannot_fail", False)


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
            f"copies are the usual cause; {PEER_CHECK_VARIABLE}=0 turns this check off",
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
    """Forgets all answers: a test that changes what there is, asks again.

    In a forked child a thread of the parent may have held the lock.
    """
    global _lock
    _lock = threading.Lock()
    _answers.clear()
    _are_all_to_all.cache_clear()
