"""The NCCL transport: flat buffers between distinct CUDA devices by torch's in-process NCCL.

It moves bytes. Sums are in an order of NCCL's own, so it makes them only where the caller has given the order up. What
is no flat buffer travels by torch's own copies. Only ``comm`` uses this room. It has not been run on GPUs: its tests
look at what it asks ``torch.cuda.nccl`` for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from dataparallel import _torch
from dataparallel.comm.routes import STAR

__all__ = ["Nccl", "why_not"]

_launching = threading.Lock()
"""NCCL forbids launches from several threads at a time, on whichever communicators: two that wait for each other's
kernels hang. Launches of ``torch.distributed``'s own communicators are not known here."""


def why_not(devices: Iterable[torch.device]) -> str | None:
    """What keeps NCCL from serving these devices, in words; ``None`` if nothing does."""
    devices = list(devices)
    others = [str(device) for device in devices if device.type != "cuda"]
    if others:
        return f"NCCL moves data between CUDA devices, not {others[0]}"
    if len({*devices}) < len(devices):
        return "NCCL takes each device once"
    if not _torch.has_nccl():
        return "this build of torch has no NCCL"
    return None


class Nccl:
    """A `dataparallel.comm.routes.Carrier` for distinct CUDA devices; with sums unless ``sums`` is false."""

    def __init__(self, sums: bool) -> None:
        self._sums = sums

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """One copy, by torch."""
        return STAR.send(tensor, device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """One copy, by torch."""
        STAR.copy(target, source)

    def spread(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """One launch on every device, on its current stream."""
        if buffers:
            with _launching:
                nccl.broadcast([source, *buffers], root=0)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """One launch on every device; in slot order, by torch's copies, where sums are not NCCL's to make."""
        flats = list(flats)
        places = [place for place, flat in enumerate(flats) if flat.device == destination]
        if not self._sums or not places:
            return STAR.add_up(flats, destination)
        total = torch.empty_like(flats[places[0]])
        with _launching:
            nccl.reduce(flats, output=total, root=places[0])
        return total
