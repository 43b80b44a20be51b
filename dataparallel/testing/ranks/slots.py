"""`on_slots`: runs a function once in this process, with a list of devices for the library's slots."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dataparallel.testing.ranks.rank import Rank


def on_slots(
    function: Callable[..., Any],
    /,
    *args: Any,
    ranks: int = 2,
    device: str | Sequence[str | torch.device] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(rank, *args, **kwargs)`` once in this process, with ``rank.devices`` for ``ranks`` slots.

    Args:
        function: any callable.
        *args: passed on as they are.
        ranks: how many slots.
        device: "cpu", "cuda" or "sim", or the devices themselves. None means CUDA or simulated devices if this process
            has enough of them, else slots on the CPU.
        **kwargs: passed on as they are.

    Returns:
        A list of what the one call has returned.

    Raises:
        unittest.SkipTest: if there are fewer devices of this type.
        ValueError: if ``ranks`` or the list of devices is none of those.
    """
    __tracebackhide__ = True
    devices = choose_devices(ranks, device)
    torch.manual_seed(0)
    return [function(Rank(0, 1, devices[0], devices, "slots"), *args, **kwargs)]


def choose_devices(count: int, device: str | Sequence[str | torch.device] | None = None) -> list[torch.device]:
    """The devices of ``count`` slots: see `on_slots`."""
    if count < 1:
        raise ValueError(f"a test runs on 1 slot or more; got {count!r}")
    if device is not None and not isinstance(device, str):
        devices = [torch.device(each) for each in device]
        if len(devices) != count:
            raise ValueError(
                f"{count} slots have {count} devices; got {len(devices)}: {[str(each) for each in devices]}"
            )
        return devices
    if device == "cpu":
        return [torch.device("cpu")] * count
    if device is None:
        kind = next((kind for kind in ("cuda", "sim") if count_devices(kind) >= count), None)
        return choose_devices(count, "cpu" if kind is None else kind)
    if count_devices(device) < count:
        raise unittest.SkipTest(f"for {count} devices of the type {device}; there are {count_devices(device)}")
    return [torch.device(device, index) for index in range(count)]


def count_devices(kind: str) -> int:
    """How many devices of a type there are in this process: "cuda", "sim" or another accelerator."""
    module = getattr(torch, kind, None)
    # Where devices are simulated, torch.accelerator means them, and CUDA is for another process.
    if module is None or not hasattr(module, "is_available") or (kind == "cuda" and hasattr(torch, "sim")):
        return 0
    return int(module.device_count()) if module.is_available() else 0
