"""The compiled extension of this process, and the index of a device in it.

`simulate` sets ``C`` once, before torch knows of the devices. The other files of this package call it; users call
``torch.sim``.
"""

from __future__ import annotations

from typing import Any

from dataparallel.testing.indices import Device, index_among

__all__ = ["Device", "index_of"]

C: Any = None


def index_of(device: Device) -> int:
    """Returns the index of a simulated device; for ``None`` that of the current device.

    Raises:
        ValueError: if this is no simulated device, or if the process does not simulate it.
    """
    about = "torch.sim is about simulated devices"
    return index_among(device, "sim", about, C.current_device, C.device_count(), "simulates")
