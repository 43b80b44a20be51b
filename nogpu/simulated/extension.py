"""The compiled extension of this process, what it is compiled from, and the index of a device in it.

`simulate` sets ``C`` once, before torch knows of the devices. The other files of this package call it; users call
``torch.sim``.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from nogpu import compiling
from nogpu.shared import Device, index_among

_FOLDERS = tuple(Path(__file__).parents[1] / "csrc" / name for name in ("shared", "simulated"))

EXTENSION = compiling.Extension(
    name="nogpu_simulated",
    what="simulated accelerators",
    folders=_FOLDERS,
    include_paths=_FOLDERS,
)


def load_extension() -> ModuleType:
    """Returns the module with the devices, see `compiling.load_extension`."""
    return compiling.load_extension(EXTENSION)


C: Any = None


def index_of(device: Device) -> int:
    """Returns the index of a simulated device; for ``None`` that of the current device.

    Raises:
        ValueError: if this is no simulated device, or if the process does not simulate it.
    """
    about = "torch.sim is about simulated devices"
    return index_among(device, "sim", about, C.current_device, C.device_count(), "simulates")
