"""What `dataparallel.trace` is told of each copy between devices: its route, its bytes and its two ends.

Who launches a copy calls `note` beside it. Without a trace that is one question. It moves nothing itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataparallel import _torch, profiling

__all__ = ["bytes_of", "note", "note_bytes"]


def note(route: str, source: Tensor, target: torch.device) -> None:
    """Tells a trace, if one runs, that ``source`` goes to the device ``target``. Nothing travels within a device.

    ``route``: in a word or two, how: "direct" for one copy that the operation needs anyway, or the name of a route or
    of a transport.
    """
    if profiling.recorder is not None:
        note_bytes(route, bytes_of(source), source.device, target)


def note_bytes(route: str, number_of_bytes: int, source: torch.device, target: torch.device) -> None:
    """`note` for a kernel that reads and writes several tensors."""
    tracing = profiling.recorder
    if tracing is not None and source != target:
        tracing.sent(route, number_of_bytes, source, target)


def bytes_of(tensor: Tensor) -> int:
    """The bytes that a copy of the tensor moves: of a sparse COO tensor those of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return sum(part.numel() * part.itemsize for part in _torch.sparse_memory(tensor))
    return tensor.numel() * tensor.itemsize
