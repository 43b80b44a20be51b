"""Which devices are measured: the machine's accelerators, or where it has none the CPU and simulated devices.

Simulated devices are no accelerators. They are separate devices to torch and to the library, which scatters,
replicates and gathers between them as between GPUs, but their operators run on the CPU's cores.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dataparallel.devices import all_devices
from dataparallel.testing import ToolsMissing, simulate

SIMULATED = 8


@dataclass(frozen=True)
class Places:
    """`real` are the accelerators, or the CPU; `simulated` is empty if `why_not_simulated` says why."""

    real: list[torch.device]
    simulated: list[torch.device]
    why_not_simulated: str = ""

    def clocks_off(self) -> AbstractContextManager[None]:
        """For what is timed: no accelerator checks each access to its memory. Checks of results run with the clocks."""
        return torch.sim.clocks(False) if self.simulated else nullcontext()


def find_places() -> Places:
    """The devices of this process; call it before the first backward, which is when torch counts them.

    Where there is an accelerator nothing is simulated: torch has one kind of accelerator in a process.
    """
    accelerators = all_devices()
    if accelerators:
        return Places(accelerators, [], "this machine has accelerators")
    cpu = [torch.device("cpu")]
    _keep_freed_memory()
    try:
        return Places(cpu, simulate(SIMULATED))
    except ToolsMissing as error:
        return Places(cpu, [], str(error))


def _keep_freed_memory() -> None:
    """Has the C library keep memory that is freed, as accelerators' allocators do, where it can be told to.

    Otherwise it gives large blocks back to the system, and the next ones come page by page, which takes longer than
    filling them. Which sizes that meets is luck.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not the GNU C library
        return
    trim_threshold, mmap_max = -1, -4  # their numbers in malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def computing_devices(devices: list[torch.device]) -> int:
    """How many times as fast as one device these could be: simulated ones share the CPU as slots on one device do."""
    return 1 if is_simulated(devices[0]) else len(set(devices))


def is_simulated(device: torch.device) -> bool:
    return device.type == "sim"


def device_name(device: torch.device) -> str:
    """The product's name where the backend tells it, else the device type."""
    if device.type == "cpu":
        return "cpu"
    if is_simulated(device):
        return "simulated on cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return name(device) if name else device.type
