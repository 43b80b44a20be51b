"""`links_between`: whether accelerators share links, as NVML or their device module says, and how fast links are.

Nothing is measured: the times are those of data sheets. A device module may say ``links_are_all_to_all = True``. A user
who knows better names a route (`comm.using`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import torch

from dataparallel.forks import in_forked_child


class Links(NamedTuple):
    """The links of a group of accelerators: ``latency`` in seconds, ``bandwidth`` in bytes per second and direction.

    ``is_all_to_all``: every pair of devices has a link of its own, so all devices can send at the same time, each to
    another one. If False, copies may share links: a PCIe tree, the host, or an unknown machine.
    """

    is_all_to_all: bool
    latency: float
    bandwidth: float


MAYBE_SHARED = Links(False, 10e-6, 25e9)
"""The times of PCIe 4.0 with 16 lanes."""

ALL_TO_ALL = Links(True, 9e-6, 225e9)
"""NVLink of an A100: three quarters of the 300 GB/s in each direction that its data sheet names."""

_NVLINK, _OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK and NVML_P2P_STATUS_OK


def links_between(devices: Sequence[torch.device]) -> Links:
    """The links between the accelerators among ``devices``."""
    types = {device.type for device in devices if device.type != "cpu"}
    return ALL_TO_ALL if len(types) == 1 and _are_all_to_all(*types) else MAYBE_SHARED


@cache
def _are_all_to_all(device_type: str) -> bool:
    if device_type == "cuda":
        return importlib.util.find_spec("pynvml") is not None and nvlink_joins_all(importlib.import_module("pynvml"))
    return getattr(torch.get_device_module(device_type), "links_are_all_to_all", False) is True


def nvlink_joins_all(nvml: Any) -> bool:
    """True if NVLink joins every two GPUs of the machine; False if NVML fails.

    NVML is asked about all GPUs, not only those of a call, because it may number them in another order than CUDA.
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


@in_forked_child
def forget() -> None:
    """Forgets the answers: a forked child, and a test that changes them, asks again."""
    _are_all_to_all.cache_clear()
