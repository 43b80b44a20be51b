"""What tests of memory share: bytes on simulated devices, when they are settled."""

import gc
import time
from collections.abc import Sequence

import torch


def allocated(devices: Sequence[torch.device], settled: list[int] | None = None) -> list[int]:
    """Bytes on each device, when they are ``settled``: an engine's thread may be late to drop its part of a graph."""
    gc.collect()
    for device in devices:
        torch.sim.synchronize(device)
    if settled is None:
        time.sleep(0.1)
    for _ in range(100):
        found = [torch.sim.memory_allocated(device) for device in devices]
        if settled is None or found == settled:
            break
        time.sleep(0.01)
    return found
