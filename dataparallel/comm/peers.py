"""What is tried once before it is trusted: copies between two accelerators, and kernels that read the memory of peers.

If an IOMMU or PCIe access control sits between two GPUs, a copy may return without an error and bring garbage. So each
ordered pair is checked before its first use; ``comm.transport_choice`` sends calls with a failed pair through the host.
Kernels that read peers over PCIe have brought wrong data on some machines where copies were right. Where nobody has
asked for them, they serve only if NVLink joins all devices, and if they pass a check too. No test shows that the checks
find a broken pair of real GPUs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dataparallel.comm.kernels import launch
from dataparallel.comm.streams.current import kept_stream, streams_set
from dataparallel.comm.tables import TensorRow
from dataparallel.devices import CPU
from dataparallel.environment import says_no
from dataparallel.forks import in_forked_child

# ---- copies between two accelerators ---------------------------------------------------------------------------------

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
    """The ordered pairs of accelerators among distinct ``devices`` that fail their check."""
    accelerators = [device for device in devices if device != CPU]
    # Simulated devices say that the host makes their copies. A check would take memory that tests count to the byte.
    if any(getattr(torch.get_device_module(device), "copies_cannot_fail", False) for device in accelerators):
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


# ---- kernels that read peers -----------------------------------------------------------------------------------------

P2P_BY_NVLINK, P2P_OK = 2, 0  # numbers, because some releases of pynvml have a wrong type for the names

_NUMEL = 700_001
"""Elements of the tensors in the check: above 2 MiB, and such that most rows are not aligned to 16 bytes."""


def why_no_kernels_by_default(devices: Sequence[torch.device]) -> str | None:
    """Why kernels do not serve between these distinct CUDA devices unless asked for, in words; ``None`` if they do.

    It runs the check of kernels; ``comm.transport_choice`` remembers what it returns.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return "memory of cudaMallocAsync may not be readable by peers"
    if (problem := _why_not_linked(devices)) is not None:
        return problem
    if not kernels_pass_check(devices):
        return "kernels that read peers have failed their check: their results differed from those of copies"
    return None


def _why_not_linked(devices: Sequence[torch.device]) -> str | None:
    """Asks NVML whether NVLink joins each pair."""
    if importlib.util.find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed, and NVML says whether NVLink joins the devices"
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            for (one, first), (other, second) in combinations(zip(devices, handles, strict=True), 2):
                if nvml.nvmlDeviceGetP2PStatus(first, second, P2P_BY_NVLINK) != P2P_OK:
                    return f"no NVLink joins {one} and {other}"
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return f"NVML does not say whether NVLink joins the devices: {error}"
    return None


@torch.no_grad()
def kernels_pass_check(devices: Sequence[torch.device]) -> bool:
    """True if kernels on all devices gather and sum ``float32`` as the host does, to the bit.

    Each round has new data in the same memory: a device that reads stale values fails. Sums of ``float32`` show the
    order of their terms, which those of 16-bit numbers often do not.
    """
    random = torch.Generator().manual_seed(0)
    with streams_set({device: kept_stream(device, "peers are checked") for device in devices}):
        sources = [torch.zeros(_NUMEL, device=device) for device in devices]
        wholes = [torch.zeros(len(devices), _NUMEL, device=device) for device in devices]
        sums = [torch.zeros_like(source) for source in sources]
        gathers = [TensorRow(row, [source]) for whole in wholes for row, source in zip(whole, sources, strict=True)]
        # From element `at` on, so that most terms are not aligned to 16 bytes.
        added = [TensorRow(total[at:], [source[at:] for source in sources]) for at, total in enumerate(sums)]
        for _ in range(3):
            data = torch.empty(len(devices), _NUMEL, device=CPU).normal_(generator=random)
            for source, values in zip(sources, data, strict=True):
                source.copy_(values)  # the host waits for it, so any stream may read the copy
            launch(gathers)
            launch(added)
            found = [result.cpu() for result in (*wholes, *sums)]  # of all, so that no kernel runs any more
            total = functools.reduce(torch.add, data)
            expected = [data] * len(devices) + [
                torch.cat([total.new_zeros(at), total[at:]]) for at in range(len(devices))
            ]
            if not all(map(torch.equal, found, expected)):
                return False
    return True
