"""Which devices are measured: the machine's accelerators or, where it has none, the CPU and simulated devices.

Simulated devices are no accelerators. To torch and to the library they are separate devices, and the library
scatters, replicates and gathers between them as between GPUs. But their operators run on the CPU's cores. The same is
true of the CUDA devices of a stand-in, with which ``python -m nogpu.cuda -m pytest bench`` runs. They
have torch's own functions for copies between devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dataparallel.devices import all_devices
from nogpu import SimulationUnavailable, cuda, simulate
from nogpu.compiling import fingerprint
from nogpu.simulated.extension import EXTENSION
from reporting import Report

SIMULATED = 8


@dataclass(frozen=True)
class Places:
    """`real` has the accelerators, or the CPU. Where `simulated` is empty, `why_not_simulated` says why.

    A stand-in's devices are accelerators here.
    """

    real: list[torch.device]
    simulated: list[torch.device]
    why_not_simulated: str = ""

    @property
    def apart(self) -> list[torch.device]:
        """The devices with memory of their own: simulated ones or accelerators. Empty where there is only the CPU."""
        return self.simulated or [device for device in self.real if device.type != "cpu"]

    def apart_or_skip(self, count: int, report: Report) -> list[torch.device]:
        """At least ``count`` devices of `apart`. With fewer, the test is skipped and ``report`` says why."""
        if len(self.apart) >= count:
            return self.apart
        why = f"this machine has {len(self.apart)}" if self.apart else self.why_not_simulated
        note = f"Rows are missing, because they need {count} devices: {why}."
        if note not in report.notes:
            report.notes.append(note)
        pytest.skip(note)

    @property
    def simulator(self) -> Any:
        """What has clocks and timelines: ``torch.sim``, or the stand-in for CUDA; ``None`` where there are neither."""
        if cuda.is_stand_in():
            return cuda
        return torch.sim if self.simulated else None

    def clocks_off(self) -> AbstractContextManager[None]:
        """For timing: no accelerator checks each access to its memory. Results are checked with the clocks on."""
        return nullcontext() if self.simulator is None else self.simulator.clocks(False)


def keep_freed_memory() -> None:
    """Tells the C library, where it can be told, to keep freed memory, as the allocators of accelerators do.

    Otherwise it gives large blocks back to the system, and the next ones come page by page, which takes longer than
    filling them. Which sizes are affected depends on chance.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not the GNU C library
        return
    trim_threshold, mmap_max = -1, -4  # their numbers in malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def find_places() -> Places:
    """The devices of this process. To be called before the first backward, which is when torch counts the devices.

    Where there is an accelerator nothing is simulated: torch has one kind of accelerator in a process. Where the
    simulated devices cannot be compiled the reason is kept, and the benchmarks run on CPU slots.
    """
    accelerators = all_devices()
    if accelerators:
        return Places(accelerators, [], "this machine has accelerators")
    cpu = [torch.device("cpu")]
    keep_freed_memory()
    try:
        return Places(cpu, simulate(SIMULATED))
    except SimulationUnavailable as error:
        return Places(cpu, [], first_lines(str(error)))


def first_lines(message: str, most: int = 300) -> str:
    """The beginning of what may be pages of a compiler's output, as one line without a full stop."""
    line = " ".join(message.split()).rstrip(".")
    return line if len(line) <= most else f"{line[:most]} ..."


def slots_on(devices: Sequence[torch.device], count: int) -> list[torch.device]:
    """``count`` slots, dealt out in turn to the devices."""
    return [devices[slot % len(devices)] for slot in range(count)]


def is_simulated(device: torch.device) -> bool:
    return device.type == "sim"


def device_name(device: torch.device) -> str:
    """The name of the product where the backend knows it, otherwise the device type."""
    if device.type == "cpu":
        return "cpu"
    if is_simulated(device):
        return "simulated on cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return name(device) if name else device.type


def simulator_notes(places: Places) -> list[str]:
    """What a report says about simulated devices, or about those of a stand-in; nothing where there is neither.

    A simulator has the name under which it was compiled, which is made from its sources, torch and Python.
    """
    if cuda.is_stand_in():
        return [
            f"Devices: {device_name(places.real[0])}. torch's CUDA build runs, with its own functions for copies. A "
            "stand-in answers CUDA's and NCCL's functions, and the CPU computes the kernels."
        ]
    if not places.simulated:
        return []
    return [f"Simulator: {fingerprint(EXTENSION)}. Only results of the same simulator can be compared."]
