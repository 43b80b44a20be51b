"""The index of a device, for the functions that users ask about one. Each front end calls it with its own type.

This file touches no device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["Device", "index_among"]

Device: TypeAlias = "torch.device | str | int | None"


def index_among(device: Device, type_: str, about: str, current: Callable[[], int], count: int, has: str) -> int:
    """Returns the index of a device; for ``None`` that of the current device.

    Args:
        device: what was asked for. An index counts among the devices of the type.
        type_: of these devices.
        about: what the caller is about, for the message: "torch.sim is about simulated devices".
        current: returns the index of the current device.
        count: how many devices there are.
        has: what the process does with them, for the message: "simulates".

    Raises:
        ValueError: if this is a device of another type, or if the process does not have it.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != type_:
            raise ValueError(f"{about}; got {device}")
        device = device.index
    index = current() if device is None else device
    if not 0 <= index < count:
        raise ValueError(f"{type_}:{index}: this process {has} {count} devices, {type_}:0 to {type_}:{count - 1}")
    return index
