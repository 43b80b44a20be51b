"""How many samples the memory of each slot's device holds, as far as backends tell.

``threads.slot_times`` reads the memory in measured calls. ``threads.balance`` asks what follows. These are estimates:
a forward is known by what it leaves on a device, and a backward not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dataparallel.devices import CPU

__all__ = ["free_bytes", "samples_that_fit", "shares_by_memory"]

USABLE = 0.75  # part of the free memory that a forward may fill: gradients and the gathered output need the rest


def free_bytes(device: torch.device) -> int | None:
    """The bytes that a tensor could have: what the device has, and what torch's allocator has of it without using it.

    ``None`` if the backend does not tell.
    """
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # such a backend does not count, or has no limit
        return None


def samples_that_fit(
    slots: Sequence[torch.device],
    chunks: Sequence[int],
    free: Mapping[torch.device, int],
    taken: Mapping[torch.device, int],
) -> tuple[float, ...]:
    """For each slot the samples that its device has memory for; infinite where that is not known.

    Slots on one device share it. ``free`` were the bytes before a call in which the forward of ``chunks`` has ``taken``
    some.
    """
    most = [math.inf] * len(slots)
    for device, bytes_taken in taken.items():
        here = [slot for slot, other in enumerate(slots) if other == device]
        if bytes_taken > 0:
            room = USABLE * free[device] * sum(chunks[slot] for slot in here) / bytes_taken
            for slot in here:
                most[slot] = math.floor(room / len(here))
    return tuple(most)


def shares_by_memory(slots: Sequence[torch.device]) -> tuple[float, ...]:
    """Shares before anything is measured: equal, but less where less than half of the largest free memory is free."""
    free = {device: free_bytes(device) for device in {*slots} - {CPU}}
    known = [(free.get(slot) or 0) / slots.count(slot) for slot in slots]
    if None in free.values() or not any(known):
        return (1.0,) * len(slots)
    return tuple(min(1.0, max(2 * each / max(known), 1e-3)) for each in known)
