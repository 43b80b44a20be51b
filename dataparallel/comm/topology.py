"""The links between the devices of one call: the same memory, NVLink, PCIe with peer access, or only the host.

This room asks torch and NVML and remembers the answers. It copies nothing: ``peer_check`` finds out if a link brings
the right data. ``comm.select`` asks, and ``comm.choice`` decides by the answers.

It has not been tried on a machine with several GPUs.
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

__all__ = ["Link", "Topology", "forget", "of"]

# Numbers instead of pynvml's names: releases differ in the names that they define.
_P2P_NVLINK = 2
_P2P_OK = 0


class Link(Enum):
    """The kinds of link, the fastest first."""

    SAME = 0
    """One memory: a device and itself, and the CPU with any index."""
    NVLINK = 1
    PEER = 2
    """Each device can reach the other's memory, over PCIe as far as is known."""
    HOST = 3
    """No peer access: data passes through host memory. Also the link of the CPU and an accelerator."""


@dataclass(frozen=True)
class Topology:
    """The devices of a call, and the links between them.

    Attributes:
        devices: in slot order, the source or the destination included. A device may be listed several times.
        links: the link for every ordered pair of positions in ``devices``.
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
        """The slowest link between any two devices; ``Link.SAME`` for a single device."""
        return max(self.links.values(), key=lambda link: link.value, default=Link.SAME)

    @cached_property
    def without_peer_access(self) -> tuple[torch.device, torch.device] | None:
        """The first two devices without peer access; ``None`` if all have it."""
        for (one, other), link in self.links.items():
            if link is Link.HOST:
                return self.devices[one], self.devices[other]
        return None


def of(devices: Sequence[torch.device]) -> Topology:
    """The links between ``devices``. It asks about no other device, and makes no context on any.

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
        # torch cannot ask every accelerator about peers; its copies work with and without peer access.
        return Link.PEER
    # The kernels run on either device, so peer access counts only if it holds both ways.
    if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)):
        return Link.HOST
    return Link.NVLINK if _are_linked_by_nvlink(one, other) else Link.PEER


def _are_linked_by_nvlink(one: torch.device, other: torch.device) -> bool:
    """True if NVML says so, through bridges or switches. False if NVML does not know."""
    if torch.version.hip is not None or importlib.util.find_spec("pynvml") is None:
        return False
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            # By UUID: CUDA_VISIBLE_DEVICES and CUDA's order make torch's indices differ from NVML's.
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
def forget() -> None:
    """Forgets all answers."""
    _of.cache_clear()
    _link.cache_clear()
