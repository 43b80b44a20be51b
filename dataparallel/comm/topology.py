"""What lies between the devices of one call: the same memory, NVLink, PCIe with peer access, or only the host.

This room asks torch and NVML and remembers the answers; it copies nothing, and whether a link carries data unharmed is
``peer_check``'s question. ``choice`` decides by what is said here.

What is said of CUDA devices needs CUDA to be tried: several GPUs have not answered these questions yet.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import torch

from dataparallel.forks import in_forked_child

__all__ = ["Link", "Topology", "of"]

# A number, not pynvml's name: releases differ in what they define.
_P2P_NVLINK = 2
_P2P_OK = 0


class Link(Enum):
    """How two places are connected, the fastest first."""

    SAME = 0
    """One memory: a device and itself, and the CPU under whatever index."""
    NVLINK = 1
    PEER = 2
    """Each can reach the other's memory, over PCIe as far as known."""
    HOST = 3
    """No peer access: what goes from one to the other passes through host memory. The CPU and an accelerator, too."""


@dataclass(frozen=True)
class Topology:
    """The devices that take part in a call, and what lies between them.

    Attributes:
        devices: in slot order, with the source or the destination among them; one may be listed several times.
        links: for every two positions in ``devices``, in both orders.
    """

    devices: tuple[torch.device, ...]
    links: Mapping[tuple[int, int], Link]

    @cached_property
    def distinct(self) -> tuple[torch.device, ...]:
        """One device for each memory, in order."""
        return tuple(
            device
            for position, device in enumerate(self.devices)
            if all(self.links[earlier, position] is not Link.SAME for earlier in range(position))
        )

    @cached_property
    def slowest(self) -> Link:
        """The slowest link between any two; ``Link.SAME`` where there are no two."""
        return max(self.links.values(), key=lambda link: link.value, default=Link.SAME)

    @cached_property
    def without_peer_access(self) -> tuple[torch.device, torch.device] | None:
        """The first two devices between which everything passes through the host, if any."""
        for (one, other), link in self.links.items():
            if link is Link.HOST:
                return self.devices[one], self.devices[other]
        return None


def of(devices: Sequence[torch.device]) -> Topology:
    """What lies between ``devices``. Others are not asked about, and no context is made on any.

    Answers are remembered for the process; a forked child asks again.
    """
    return _of(tuple(devices))


@lru_cache(maxsize=256)
def _of(devices: tuple[torch.device, ...]) -> Topology:
    links = {(i, j): _link(one, other) for i, one in enumerate(devices) for j, other in enumerate(devices) if i != j}
    return Topology(devices, links)


@lru_cache(maxsize=4096)
def _link(one: torch.device, other: torch.device) -> Link:
    types = {one.type, other.type}
    if one == other or types == {"cpu"}:
        return Link.SAME
    if len(types) > 1:
        return Link.HOST
    if types != {"cuda"}:
        # torch has no question about peers that every accelerator answers; its copies find the way themselves.
        return Link.PEER
    # A kernel on either device reaches the other's memory only where both may.
    if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)):
        return Link.HOST
    return Link.NVLINK if _are_linked_by_nvlink(one, other) else Link.PEER


def _are_linked_by_nvlink(one: torch.device, other: torch.device) -> bool:
    """By NVML's word, through bridges and switches alike. What NVML does not know is no NVLink."""
    if torch.version.hip is not None or importlib.util.find_spec("pynvml") is None:
        return False
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            # By UUID: CUDA_VISIBLE_DEVICES and CUDA's own order make indices differ from NVML's.
            first, second = (
                nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
                for device in (one, other)
            )
            return bool(nvml.nvmlDeviceGetP2PStatus(first, second, _P2P_NVLINK) == _P2P_OK)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return False


@in_forked_child
def _forget() -> None:
    _of.cache_clear()
    _link.cache_clear()
