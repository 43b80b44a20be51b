"""`why_not_by_default`: whether kernels that read the memory of peers serve where nobody has asked for them.

They do where NVLink joins all devices, peers can read what torch's allocator hands out, and a check at first use has
passed. Elsewhere plain copies serve: kernels that read peers over PCIe have brought wrong data on some machines where
copies were right.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, combinations
from typing import Any

import torch
from torch import Tensor

from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.routes import STAR
from dataparallel.comm.streams.current import kept_stream, streams_set
from dataparallel.comm.tables import Part, all_gather, reduce_scatter, rows_in
from dataparallel.devices import CPU
from dataparallel.forks import in_forked_child

P2P_BY_NVLINK, P2P_OK = 2, 0  # numbers, because some releases of pynvml have a wrong type for the names

_ROUNDS = 3
_NUMELS = (700_001, 5, 0, 40_003)
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


@cache
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
    """True if kernels on all devices at once gather and sum ``float32`` as copies do, to the bit.

    Each round has new data in the same memory: a device that reads stale values fails. Sums of ``float32`` show the
    order of their terms, which those of 16-bit numbers often do not.
    """
    owners, random = len(devices), torch.Generator().manual_seed(0)
    sizes = [-(-numel // owners) for numel in _NUMELS]
    in_shard, in_full = [*accumulate(sizes, initial=0)], [*accumulate(_NUMELS, initial=0)]
    parts = [
        Part(*starts, tuple(max(min(size, numel - owner * size), 0) for owner in range(owners)))
        for starts, size, numel in zip(zip(in_shard, in_full, strict=True), sizes, _NUMELS, strict=False)
    ]
    plans = [all_gather(parts, slot) for slot in range(owners)]
    plans += [reduce_scatter(parts, owner, owners) for owner in range(owners)]

    def made(places: Sequence[torch.device]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The sources, and for each plan its tensors, of which the last is the target."""
        shards = [torch.zeros(in_shard[-1], device=place) for place in places]
        grads = [torch.zeros(sum(part.counts), device=place) for place in places for part in parts]
        gathers = [[*shards, torch.zeros(in_full[-1], device=place)] for place in places]
        return shards + grads, gathers + [[*grads, torch.zeros(in_shard[-1], device=place)] for place in places]

    with streams_set({device: kept_stream(device, "peers are checked") for device in devices}):
        (sources, on_host), (copies, there) = made([CPU] * owners), made(devices)
        tables = [DeviceTable(plan, of[-1].device, torch.float32) for plan, of in zip(plans, there, strict=True)]
        for _ in range(_ROUNDS):
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source.normal_(generator=random))  # the host waits for it, so any stream may read the copy
            for table, tensors in zip(tables, there, strict=True):
                table.launch(tensors)
            for plan, tensors in zip(plans, on_host, strict=True):
                STAR.execute(rows_in(plan, tensors))
            found = [tensors[-1].cpu() for tensors in there]  # of all, so that no kernel runs any more
            if not all(map(torch.equal, found, [tensors[-1] for tensors in on_host])):
                return False
    return True


@in_forked_child
def forget() -> None:
    """Forgets all results, in a forked child and in tests."""
    _has_passed_check.cache_clear()
