"""The compiled extension of this process, and the index of a device in it.

`simulate` sets ``C`` once, before torch knows of the devices. The other files of this package call it; users call
``torch.sim``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

__all__ = ["Device", "index_of"]

Device: TypeAlias = "torch.device | str | int | None"

C: Any = None


def index_of(device: Device) -> int:
    """Returns the index of a simulated device; for ``None`` that of the current device.

    Raises:
        ValueError: if this is no simulated device, or if the process does not simulate it.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "sim":
            raise ValueError(f"torch.sim is about simulated devices; got {device}")
        device = device.index
    index, count = C.current_device() if device is None else device, C.device_count()
    if not 0 <= index < count:
        raise ValueError(f"sim:{index}: this process simulates {count} devices, sim:0 to sim:{count - 1}")
    return index
