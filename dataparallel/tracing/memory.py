"""What accelerators have in memory before and after a block, and at most inside it.

``torch.accelerator`` counts bytes for each device: CUDA's allocator does, and so do simulated devices. Host memory has
no such count, so CPU slots have no figure. To read the counters makes no context on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dataparallel.devices import all_devices

__all__ = ["DeviceMemory", "MemoryBefore"]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of tensors on one device.

    Attributes:
        device: the device.
        slots: the slots that have run on it, which share these bytes.
        before, after: when the block began, and when it had ended.
        peak: at most in between.
    """

    device: torch.device
    slots: tuple[int, ...]
    before: int
    after: int
    peak: int


class MemoryBefore:
    """Reads the counters when a block begins, and sets back their peaks, so that a later peak is that of the block."""

    def __init__(self) -> None:
        self._before: dict[torch.device, int] = {}
        for device in all_devices():
            try:
                torch.accelerator.reset_peak_memory_stats(device)
                self._before[device] = torch.accelerator.memory_allocated(device)
            except (RuntimeError, NotImplementedError):  # the backend has no such counters
                continue

    def until_now(self, slots: Sequence[torch.device]) -> list[DeviceMemory]:
        """For each device of ``slots`` what has happened since the beginning."""
        return [
            DeviceMemory(
                device,
                tuple(slot for slot, other in enumerate(slots) if other == device),
                self._before[device],
                torch.accelerator.memory_allocated(device),
                torch.accelerator.max_memory_allocated(device),
            )
            for device in dict.fromkeys(slots)
            if device in self._before
        ]
