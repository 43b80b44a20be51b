"""Bytes on simulated devices, and objects in the process, once nothing is on its way out any more."""

import gc
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

WITHOUT_LOCK = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""True in builds of Python that can run without the lock: reference counts work in another way there."""


def soon(condition: Callable[[], bool]) -> bool:
    """True if the condition holds: now, or in builds without the lock within two seconds.

    There what a thread has made, and another one drops, is freed when the first one runs next. Idle workers wake up for
    it several times a second.
    """
    until = time.monotonic() + (2.0 if WITHOUT_LOCK else 0.0)
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def allocated(devices: Sequence[Any] | None = None, expected: list[int] | None = None) -> list[int]:
    """Bytes on each of the simulated devices, by default on all. On other devices nothing is counted: an empty list.

    A thread of the autograd engine may drop its part of a graph a moment late. With ``expected`` this waits only until
    the bytes are these, for a second at most.
    """
    for _ in range(4 if WITHOUT_LOCK else 1):  # what is freed drops objects of other threads in turn
        gc.collect()
    if devices is None:
        devices = [torch.device("sim", index) for index in range(torch.sim.device_count())]
    counted = [device for device in map(torch.device, devices) if device.type == "sim"]
    for device in counted:
        torch.sim.synchronize(device)
    if expected is None:
        time.sleep(0.1)
    for _ in range(100):
        found = [torch.sim.memory_allocated(device) for device in counted]
        if expected is None or found == expected:
            break
        time.sleep(0.01)
        if WITHOUT_LOCK:
            gc.collect()
    return found


class Growth:
    """Bytes on an accelerator since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)

    @property
    def now(self) -> int:
        return torch.accelerator.memory_allocated(self.device) - self.before

    @property
    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self.device) - self.before


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def live_objects() -> int:
    """How many objects the garbage collector knows, after a collection."""
    gc.collect()
    return len(gc.get_objects())
