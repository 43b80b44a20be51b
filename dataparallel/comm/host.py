"""The host transport: from one accelerator to another through host memory, where copies between them are not trusted.

It is slower than any other and right wherever a device can talk to the host. It checks nothing and chooses nothing:
only ``comm`` calls it, with arguments that ``comm`` has checked and with gradient recording off.

Both copies block. So the first is complete before the second reads the staging buffer, whichever streams the two are
on, and the second is complete before the buffer is freed: nothing has to be held, on any backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from dataparallel.comm import copies
from dataparallel.comm.buckets import travels_flat
from dataparallel.comm.routes import add_one_by_one
from dataparallel.devices import CPU

__all__ = ["ThroughHost", "send"]


def send(tensor: Tensor, device: torch.device, *, own: bool = False) -> Tensor:
    """``tensor`` on ``device``, as `copies.send` returns it, with no copy from accelerator to accelerator.

    The copies are ordered after the current stream of the tensor's device, and after that of ``device``.
    """
    if tensor.device == device or "cpu" in (tensor.device.type, device.type):
        return copies.send(tensor, device, own=own)
    original, tensor = tensor, tensor.detach()
    if travels_flat(original) and _can_pin(tensor.device.type):
        # Pinned memory is what a device reads and writes at full speed. Strides are those that `Tensor.to` gives.
        staging = torch.empty_like(tensor, device="cpu", pin_memory=True)
        staging.copy_(tensor)
    else:
        # Sparse, quantised and lazily conjugated tensors and subclasses know themselves how they are moved.
        staging = tensor.cpu()
    return copies.same_kind(staging.to(device), original)


@cache
def _can_pin(device_type: str) -> bool:
    """Whether the backend has pinned host memory; there is no way to ask but to try."""
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False


class ThroughHost:
    """A `dataparallel.comm.routes.Transport` whose copies between accelerators all go through the host."""

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See `send`; on the tensor's own device a copy of its own."""
        return send(tensor, device, own=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """What is on the device of ``target`` already is copied there."""
        target.copy_(send(source, target.device))

    def spread(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """To the host once, and from there to each device."""
        if buffers:
            staged = send(source, CPU)
            for buffer in buffers:
                buffer.copy_(staged)

    def add_up(self, flats: Iterable[Tensor], destination: torch.device) -> Tensor:
        """Each buffer is asked for when the one before has been added."""
        return add_one_by_one(flats, lambda flat: send(flat, destination))
