"""`why_not_by_default`: whether kernels that read the memory of peers serve where nobody has asked for them.

They do where NVLink joins all devices, peers can read what torch's allocator hands out, and a check at first use has
passed. Elsewhere plain copies serve: kernels that read peers over PCIe have brought wrong data on some machines where
copies were right.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from dataparallel.comm.kernels import launch
from dataparallel.comm.streams.current import kept_stream, streams_set
from dataparallel.comm.tables import TensorRow
from dataparallel.forks import in_forked_child

P2P_BY_NVLINK, P2P_OK = 2, 0  # numbers, because some releases of pynvml have a wrong type for the names

_ROUNDS = 3
_NUMEL = 700_001
"""Elements of the tensors in the check: above 2 MiB, and such that most rows are not aligned to 16 bytes."""


def why_not_by_default(devices: Sequence[torch.device]) -> str | None:
    """Why kernels do not serve between these distinct CUDA devices unless asked for, in words; ``None`` if they do.

    The first call for these devices runs the check.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return "memory of cudaMallocAsync may not be readable by peers"
    if (problem := _why_not_linked(devices)) is not None:
        return problem
    if not _has_passed_check(tuple(devices)):
        return "kernels that read peers have failed their check: their results differed from those of copies"
    return None


@functools.cache
def _has_passed_check(devices: tuple[torch.device, ...]) -> bool:
    return passes_check(devices)


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
def passes_check(devices: Sequence[torch.device]) -> bool:
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
        for _ in range(_ROUNDS):
            data = torch.empty(len(devices), _NUMEL).normal_(generator=random)
            for source, values in zip(sources, data, strict=True):
                source.copy_(values)  # the host waits for it, so any stream may read the copy
            launch(gathers)
            launch(added)
            found = [result.cpu() for result in (*wholes, *sums)]  # of all, so that no kernel runs any more
            total = functools.reduce(torch.add, data)
            expected = [data] * len(devices) + [torch.cat([torch.zeros(at), total[at:]]) for at in range(len(devices))]
            if not all(map(torch.equal, found, expected)):
                return False
    return True


@in_forked_child
def forget() -> None:
    """Forgets all results, in a forked child and in tests."""
    _has_passed_check.cache_clear()
