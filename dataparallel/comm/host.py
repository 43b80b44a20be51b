"""`ThroughHost`: a transport that copies from one accelerator to another through host memory, slowly.

The host waits for the copy into the staging buffer and for the copy out of it, so it can free the buffer at once,
whatever streams the copies run on. The current streams of both devices are ordered as for a copy by torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from dataparallel.comm.buckets import travels_flat
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.transport import Transport
from dataparallel.devices import CPU


class ThroughHost(Transport):
    """Copies between accelerators through the host."""

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of the tensor's data on ``device``, made on the current streams of both devices."""
        if _is_direct(tensor.device, device):
            return super().send(tensor, device)
        _make_source_wait(tensor.device, [device])
        return Tensor.to(_on_host(tensor), device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source`` into ``target``: directly if both are on one device, or one on the CPU."""
        _make_source_wait(source.device, [target.device])
        target.copy_(source if _is_direct(source.device, target.device) else _on_host(source))

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the source to the host once, and from there into each buffer."""
        if buffers:
            _make_source_wait(source.device, [buffer.device for buffer in buffers])
            on_host = _on_host(source)
            for buffer in buffers:
                buffer.copy_(on_host)


def _is_direct(source: torch.device, target: torch.device) -> bool:
    return source == target or "cpu" in (source.type, target.type)


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, with the strides that `Tensor.to` gives."""
    if tensor.device != CPU and travels_flat(tensor) and can_pin(tensor.device.type):
        # Devices read and write pinned memory at full speed.
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
    # Sparse, quantised and lazily conjugated tensors and subclasses have their own way to the CPU.
    return Tensor.cpu(tensor)


def _make_source_wait(source: torch.device, targets: Iterable[torch.device]) -> None:
    """Makes the source's current stream wait for the targets' current streams, as torch does before a copy.

    What is launched after the copies comes after them, because the host has waited for them.
    """
    streams = current_streams([source, *targets])
    for device in {*streams} - {source} if source in streams else ():
        Event(streams[device]).make_wait(streams[source])


@cache
def can_pin(device_type: str) -> bool:
    """True if the backend has pinned host memory. torch has no function that tells, so this allocates some."""
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False
