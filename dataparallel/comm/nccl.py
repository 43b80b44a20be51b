"""The NCCL transport: flat buffers between distinct CUDA devices by torch's in-process NCCL.

It moves bytes, whatever they mean. Sums are in an order of NCCL's own, so it makes them only where the caller allows
any order (``deterministic=False``), and only of dtypes that it can add. Everything but flat buffers is copied by torch.
Only ``comm`` uses this room. It has not been run on GPUs: its tests look at what it asks ``torch.cuda.nccl`` for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.cuda import nccl

from dataparallel import _torch
from dataparallel.comm.routes import STAR

__all__ = ["Nccl", "why_not"]

_SUMMED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}
"""What NCCL adds as torch means it. ``bool`` and 8-bit floats it takes for bytes, others torch does not hand to it."""

_launching = threading.Lock()
"""NCCL forbids launches from several threads at a time, on whichever communicators: two that wait for each other's
kernels hang. Launches of ``torch.distributed``'s own communicators are not known here."""


def why_not() -> str | None:
    """Why there is no NCCL here, in words; ``None`` if there is."""
    return None if _torch.has_nccl() else "this build of torch has no NCCL"


class Nccl:
    """A `dataparallel.comm.routes.Transport` for distinct CUDA devices; with sums unless ``sums`` is false."""

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
            # As bytes: torch refuses to hand NCCL buffers of int16, of complex numbers and of unsigned 16 to 64 bits.
            with _launching:
                nccl.broadcast([flat.view(torch.uint8) for flat in (source, *buffers)], root=0)
            # Autograd does not see what NCCL writes, and has to know that these tensors have changed.
            increment_version(buffers)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """One launch on every device; in slot order, by torch's copies, where sums are not NCCL's to make."""
        flats = list(flats)
        places = [place for place, flat in enumerate(flats) if flat.device == destination]
        if not self._sums or not places or flats[0].dtype not in _SUMMED:
            return STAR.add_up(flats, destination)
        total = torch.empty_like(flats[places[0]])
        with _launching:
            nccl.reduce(flats, output=total, root=places[0])
        return total
