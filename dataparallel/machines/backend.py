"""What a process group of torch is: its ranks, its timeout, and the devices whose tensors it sends.

``group`` adds to it what this process keeps for the group. The rest of this room takes a `Group` and knows no more.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import distributed

from dataparallel import _torch
from dataparallel.devices import CPU

__all__ = ["Group"]


class Group:
    """A process group, asked once.

    Attributes:
        group: torch's.
        rank: of this process, in the group.
        size: how many ranks there are.
        ranks: their global ranks, which messages name.
        timeout: seconds, the group's own.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no rank of the process group: give a group to each of its ranks only")
        self.ranks = distributed.get_process_group_ranks(group)
        self.backends = _backends(group)
        self.timeout = _torch.group_timeout(group, torch.device(next(iter(self.backends)))).total_seconds()

    def can_send(self, device: torch.device) -> bool:
        """True if the group takes tensors on the device as they are. Else they go through host memory.

        gloo takes tensors of accelerators too, by copies of its own that no event of ours orders, so it gets them in
        host memory.
        """
        return device == CPU if CPU.type in self.backends and device == CPU else self.is_nccl(device)

    def is_nccl(self, device: torch.device) -> bool:
        """True if tensors on the device go through NCCL, whose collectives run on streams."""
        return self.backends.get(device.type) == "nccl"

    @property
    def exists(self) -> bool:
        """False if the group has been destroyed."""
        try:
            return distributed.get_process_group_ranks(self.group) == self.ranks
        except (KeyError, ValueError):
            return False

    @property
    def has_nccl(self) -> bool:
        """True if tensors on some type of device go through NCCL."""
        return "nccl" in self.backends.values()

    @property
    def bound_device(self) -> torch.device | None:
        """The only CUDA device that torch lets the group send from, if ``device_id`` was given to it."""
        bound: torch.device | None = self.group.bound_device_id
        return bound

    @cached_property
    def store(self) -> Any:
        """The store of all ranks of the job."""
        world: Any = distributed.group.WORLD
        return world.get_group_store()

    def names(self, ranks: list[int]) -> str:
        """Ranks of the group in words, by their global numbers: ``rank 3``, ``ranks 0 and 2``."""
        numbers = [str(self.ranks[rank]) for rank in ranks]
        if len(numbers) == 1:
            return f"rank {numbers[0]}"
        return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _backends(group: distributed.ProcessGroup) -> dict[str, str]:
    """The backend of each type of device, by torch's own words: ``cpu:gloo,cuda:nccl``."""
    found = {}
    for part in distributed.get_backend_config(group).split(","):
        device, _, name = part.partition(":")
        # gloo and NCCL are also configured for devices that they do not take.
        if name != "nccl" or device == "cuda":
            found[device] = name
    return found
