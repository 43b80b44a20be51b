"""`Check`: a line of the report, and the errors by which it says what is wrong. `CheckedMachine`: where checks run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

import torch

from dataparallel.devices import CPU, all_devices


class CheckFailed(Exception):
    """The machine or the library does something wrong. The message says what, and what to do."""


class NotHere(Exception):
    """The check needs what this machine has not got. The message says what."""


class Seen(NamedTuple):
    """What a check that has passed has seen, in words and in numbers."""

    text: str
    figures: Mapping[str, Any] = {}


@dataclass(frozen=True)
class CheckedMachine:
    """The devices that are checked, and when the checks have to end.

    Attributes:
        slots: where replicas run: on all accelerators, or twice on the only one, or twice on the CPU.
        ends_at: by `time.monotonic`.
    """

    slots: list[torch.device] = field(default_factory=lambda: _slots_of(all_devices()))
    ends_at: float = float("inf")

    @property
    def root(self) -> torch.device:
        """The device of the first slot."""
        return self.slots[0]

    @cached_property
    def devices(self) -> list[torch.device]:
        """The distinct devices."""
        return [*dict.fromkeys(self.slots)]

    @property
    def pairs(self) -> list[tuple[torch.device, torch.device]]:
        """The ordered pairs of accelerators."""
        if len(self.devices) < 2:
            raise NotHere("there is one device, so nothing travels")
        return [*permutations(self.devices, 2)]

    @property
    def has_gpus(self) -> bool:
        """True for GPUs of CUDA, and not for what stands in for them."""
        return self.root.type == "cuda" and "stand-in" not in torch.cuda.get_device_name(self.root)

    def seconds_left(self) -> float:
        """Until the checks have to end."""
        return self.ends_at - time.monotonic()

    def synchronize(self) -> None:
        """Waits until all devices are idle."""
        for device in self.devices:
            if device != CPU:
                torch.accelerator.synchronize(device)


def _slots_of(devices: list[torch.device]) -> list[torch.device]:
    return devices if len(devices) > 1 else 2 * (devices or [CPU])


@dataclass(frozen=True)
class Check:
    """One check: a line of the report.

    Attributes:
        run: returns what it has seen. Raises `CheckFailed` or `NotHere`; any other error is a failure too.
        hangs_after: seconds after which a check that has not ended is said to hang.
        takes: about how many seconds on a GPU. With less time left the check is not begun.
    """

    group: str
    name: str
    run: Callable[[CheckedMachine], Seen]
    hangs_after: float = 30.0
    takes: float = 2.0
