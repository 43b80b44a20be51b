"""`ThroughHost`: a transport that copies from one accelerator to another through host memory, slowly.

The host waits for the copy into the staging buffer and for the copy out of it, so it can free the buffer at once,
whatever streams the copies run on. The current streams of both devices are ordered as for a copy by torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from dataparallel.comm.buckets import travels_flat
from dataparallel.comm.kinds import same_kind
from dataparallel.comm.routes import STAR
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.transport import Transport
from dataparallel.devices import CPU


def send(tensor: Tensor, device: torch.device, *, own: bool = False) -> Tensor:
    """The tensor on ``device``, as `Transport.to_device` returns it, without a copy from accelerator to accelerator.

    The copies run on the current streams of both devices.
    """
    if tensor.device == device or "cpu" in (tensor.device.type, device.type):
        return STAR.to_device(tensor, device, own=own)
    original, tensor = tensor, Tensor.detach(tensor)
    with _streams_ordered(tensor.device, [device]):
        if travels_flat(original) and can_pin(tensor.device.type):
            # Devices read and write pinned memory at full speed. The strides are those that `Tensor.to` gives.
            staging = torch.empty_like(tensor, device="cpu", pin_memory=True)
            staging.copy_(tensor)
        else:
            # Sparse, quantised and lazily conjugated tensors and subclasses have their own way to the CPU.
            staging = Tensor.cpu(tensor)
        return same_kind(Tensor.to(staging, device), original, send)


@contextmanager
def _streams_ordered(source: torch.device, targets: Iterable[torch.device]) -> Iterator[None]:
    """Orders the current streams as if the copies of the block ran on those of the source and of all targets.

    The source's stream waits for the targets' streams, at the beginning and at the end of the block. They need not wait
    for the source's stream, because the host has waited for it.
    """
    streams = current_streams([source, *targets])
    source_stream = streams.pop(source, None)
    if source_stream is None:  # the source is in host memory
        yield
        return
    for target_stream in streams.values():
        Event(target_stream).make_wait(source_stream)
    yield
    for target_stream in streams.values():
        Event(target_stream).make_wait(source_stream)


@cache
def can_pin(device_type: str) -> bool:
    """True if the backend has pinned host memory. torch has no function that tells, so this allocates some."""
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False


class ThroughHost(Transport):
    """The transport that copies between accelerators through the host."""

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The function `send`, except that it returns a clone if the tensor is already on ``device``."""
        return send(tensor, device, own=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source`` into ``target``: directly if both are on one device."""
        with _streams_ordered(source.device, [target.device]):
            target.copy_(send(source, target.device))

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the source to the host once, and from there into each buffer."""
        if buffers:
            with _streams_ordered(source.device, [buffer.device for buffer in buffers]):
                on_host = send(source, CPU)
                for buffer in buffers:
                    buffer.copy_(on_host)
