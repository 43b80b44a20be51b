"""Counts what compiled replicas have had compiled in this process. ``functions`` notes, tests and reports ask."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

__all__ = ["Counts", "counts", "note"]


@dataclass(frozen=True)
class Counts:
    """How often frames of Python were compiled, and how often that failed, so that a frame runs as it is.

    A call without graph breaks is one frame. Each further part between two graph breaks is one more.

    Attributes:
        compilations: how many frames were compiled, for each device. ``None`` stands for replicas without tensors.
        eager: how many frames could not be compiled, for each device.
    """

    compilations: Counter[torch.device | None] = field(default_factory=Counter)
    eager: Counter[torch.device | None] = field(default_factory=Counter)

    def __sub__(self, earlier: Counts) -> Counts:
        """What has happened since ``earlier``."""
        return Counts(self.compilations - earlier.compilations, self.eager - earlier.eager)

    @property
    def total(self) -> int:
        """Compilations on all devices."""
        return self.compilations.total() if hasattr(self.compilations, "total") else sum(self.compilations.values())


_lock = threading.Lock()
_now = Counts()


def counts() -> Counts:
    """The counts of this process until now."""
    with _lock:
        return Counts(_now.compilations.copy(), _now.eager.copy())


def note(device: torch.device | None, compilations: int, eager: int) -> None:
    """Adds to the counts of a device."""
    with _lock:
        _now.compilations[device] += compilations
        _now.eager[device] += eager
