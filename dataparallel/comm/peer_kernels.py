"""`why_not_by_default`: whether kernels that read the memory of peers serve where nobody has asked for them.

They do where NVLink joins all devices, peers can read what torch's allocator hands out, and a check at first use has
passed. Elsewhere plain copies serve: kernels that read peers over PCIe have brought wrong data on some machines where
copies were right.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from dataparallel.comm.checks import near_equal_sizes
from dataparallel.comm.kernels import DeviceTable
from dataparallel.comm.streams.current import kept_stream, streams_set
from dataparallel.comm.tables import Part, Table, all_gather, by_torch, reduce_scatter
from dataparallel.forks import in_forked_child

P2P_BY_NVLINK, P2P_OK = 2, 0  # numbers, because some releases of pynvml have a wrong type for the names

_ROUNDS = 3
_NUMELS = (700_001, 5, 0, 40_003)
"""Elements of the tensors in the check: above 2 MiB, and such that most rows are not aligned to 16 bytes."""

_lock = threading.Lock()  # held by the thread that checks; other threads wait for its result
_results: dict[tuple[torch.device, ...], bool] = {}


def why_not_by_default(devices: Sequence[torch.device]) -> str | None:
    """Why kernels do not serve between these distinct CUDA devices unless asked for, in words; ``None`` if they do.

    The first call for these devices runs the check.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return "memory of cudaMallocAsync may not be readable by peers"
    problem = _why_not_linked(devices)
    if problem is not None:
        return problem
    with _lock:
        if (key := tuple(devices)) not in _results:
            _results[key] = passes_check(devices)
        if not _results[key]:
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
def passes_check(devices: Sequence[torch.device]) -> bool:
    """True if kernels on all devices at once gather and sum ``float32`` as copies do, to the bit.

    Each round has new data in the same memory: a device that reads stale values fails. Sums of ``float32`` show the
    order of their terms, which those of 16-bit numbers often do not.
    """
    owners, random = len(devices), torch.Generator().manual_seed(0)
    parts, in_shard, in_full = cut_as_chunks(_NUMELS, owners)
    with streams_set({device: kept_stream(device, "peers are checked") for device in devices}):
        gathers = _Checked([all_gather(parts, slot) for slot in range(owners)], devices)
        sums = _Checked([reduce_scatter(parts, owner, owners) for owner in range(owners)], devices)
        shards = _Memory([in_shard] * owners, devices)
        grads = _Memory([sum(part.counts) for _ in devices for part in parts], [d for d in devices for _ in parts])
        fulls, totals = _Memory([in_full] * owners, devices), _Memory([in_shard] * owners, devices)
        return all(
            gathers.are_right(shards.drawn(random), fulls) and sums.are_right(grads.drawn(random), totals)
            for _ in range(_ROUNDS)
        )


def cut_as_chunks(numels: Sequence[int], owners: int) -> tuple[list[Part], int, int]:
    """Cuts tensors of these sizes, as ``torch.chunk`` does. Returns the elements of a shard and of the whole too."""
    parts, in_shard, in_full = [], 0, 0
    for numel in numels:
        sizes = near_equal_sizes(numel, owners)
        parts.append(Part(in_shard, in_full, (*sizes, *[0] * (owners - len(sizes)))))
        in_shard, in_full = in_shard + sizes[0], in_full + numel
    return parts, in_shard, in_full


class _Memory:
    """Tensors of ``float32`` on devices, and the same on the host."""

    def __init__(self, numels: Sequence[int], devices: Sequence[torch.device]) -> None:
        self.host = [torch.zeros(numel) for numel in numels]
        self.on_devices = [tensor.to(device) for tensor, device in zip(self.host, devices, strict=True)]

    def drawn(self, random: torch.Generator) -> _Memory:
        """Draws new values. The host waits until they are on the devices, so any stream may read them."""
        for host, on_device in zip(self.host, self.on_devices, strict=True):
            on_device.copy_(host.normal_(generator=random))
        return self


class _Checked:
    """A table for each device, which its kernel and torch's copies execute."""

    def __init__(self, tables: Sequence[Table], devices: Sequence[torch.device]) -> None:
        self._tables = tables
        self._on_devices = [DeviceTable(t, device, torch.float32) for t, device in zip(tables, devices, strict=True)]

    def are_right(self, sources: _Memory, results: _Memory) -> bool:
        """Launches all kernels, then compares. The host waits for all of them."""
        for table, result in zip(self._on_devices, results.on_devices, strict=True):
            table.launch([*sources.on_devices, result])
        for host_table, host in zip(self._tables, results.host, strict=True):
            by_torch(host_table, [*sources.host, host])
        found: list[Tensor] = [result.cpu() for result in results.on_devices]
        return all(map(torch.equal, found, results.host))


@in_forked_child
def forget() -> None:
    """Forgets all results, in a forked child and in tests. A thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _results.clear()
