"""`Nccl`: a transport that moves flat buffers between distinct CUDA devices by torch's in-process NCCL.

Broadcasts move bytes. NCCL adds in an order of its own, so it makes sums only if the caller allows any order. This code
has not run on GPUs: its tests look at its calls of ``torch.cuda.nccl``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.cuda import nccl

from dataparallel import _torch
from dataparallel.comm.transport import Allocate, Transport

_SUMMED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}
"""The dtypes that NCCL adds as torch does. NCCL adds ``bool`` and 8-bit floats as bytes; torch passes it no others."""

launching = threading.Lock()
"""Held by the thread that launches NCCL. NCCL forbids launches from several threads at once, on any communicators: two
launches that wait for each other's kernels hang. The lock covers launches that the library makes through
``torch.distributed`` too, which has communicators of its own, but not those that the user makes."""


def why_not() -> str | None:
    """Why there is no NCCL here, in words; ``None`` if there is."""
    return None if _torch.has_nccl() else "this build of torch has no NCCL"


class Nccl(Transport):
    """NCCL between distinct CUDA devices. If ``sums`` is False, it broadcasts only, and torch's copies make sums."""

    def __init__(self, sums: bool) -> None:
        self._sums = sums

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Broadcasts with one launch on every device, on its current stream."""
        if buffers:
            # As bytes, because torch refuses to pass NCCL int16, complex numbers and unsigned 16 to 64 bits.
            with launching:
                nccl.broadcast([flat.view(torch.uint8) for flat in (source, *buffers)], root=0)
            # Autograd does not see writes by NCCL, so this tells it that these tensors have changed.
            increment_version(buffers)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """Adds with one launch on every device. torch makes sums that NCCL may not or cannot make, in slot order."""
        flats = list(flats)
        roots = [rank for rank, flat in enumerate(flats) if flat.device == destination]
        if not self._sums or not roots or flats[0].dtype not in _SUMMED:
            return super().add_up(flats, destination)
        total = torch.empty_like(flats[roots[0]])
        with launching:
            nccl.reduce(flats, output=total, root=roots[0])
        return total

    def reduce_scatter(
        self, matrices: Sequence[Tensor], out: Sequence[Tensor], empty: Allocate = torch.empty_like
    ) -> None:
        """Adds with one launch on every device, if each brings a matrix and keeps a row; torch makes other sums."""
        flats = [matrix.view(-1) for matrix in matrices]
        is_one_each = [flat.device for flat in flats] == [row.device for row in out]
        dtypes = {tensor.dtype for tensor in (*flats, *out)}
        if not self._sums or not is_one_each or len(dtypes) > 1 or not dtypes <= _SUMMED:
            super().reduce_scatter(matrices, out, empty)
            return
        with launching:
            nccl.reduce_scatter(flats, out)
        increment_version(out)
