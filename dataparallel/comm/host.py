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
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.transport import Transport
from dataparallel.devices import CPU


class ThroughHost(Transport):
    """Copies between accelerators through the host."""

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of the tensor's data on ``device``, made on the current streams of both devices."""
        if _is_direct(tensor.device, device):
            return super().send(tensor, device)
        with _streams_ordered(tensor.device, [device]):
            return Tensor.to(_on_host(tensor), device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies ``source`` into ``target``: directly if both are on one device, or one on the CPU."""
        with _streams_ordered(source.device, [target.device]):
            target.copy_(source if _is_direct(source.device, target.device) else _on_host(source))

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copies the source to the host once, and from there into each buffer."""
        if buffers:
            with _streams_ordered(source.device, [buffer.device for buffer in buffers]):
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
