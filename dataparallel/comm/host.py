"""The host transport: from one accelerator to another through host memory. It works on every device, but slowly.

Both copies block: the staging buffer is read when it is complete, and freed when it has been read, whatever streams
they run on. So no memory has to be held. As ever, the current streams of both ends are ordered around a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from dataparallel.comm.buckets import same_kind, travels_flat
from dataparallel.comm.routes import STAR
from dataparallel.comm.streams.current import Event, current_streams
from dataparallel.comm.transport import Transport
from dataparallel.devices import CPU
from dataparallel.profiling import note_copy


def send(tensor: Tensor, device: torch.device, *, own: bool = False) -> Tensor:
    """``tensor`` on ``device``, as `Transport.to_device` returns it, with no copy from accelerator to accelerator.

    The copies run on the current streams of the tensor's device and of ``device``.
    """
    if tensor.device == device or "cpu" in (tensor.device.type, device.type):
        return STAR.to_device(tensor, device, own=own)
    original, tensor = tensor, tensor.detach()
    with _ordered(tensor.device, [device]):
        note_copy("host", original, CPU)
        if travels_flat(original) and can_pin(tensor.device.type):
            # Devices read and write pinned memory at full speed. The strides are those that `Tensor.to` gives.
            staging = torch.empty_like(tensor, device="cpu", pin_memory=True)
            staging.copy_(tensor)
        else:
            # Sparse, quantised and lazily conjugated tensors and subclasses have their own way to the CPU.
            staging = tensor.cpu()
        note_copy("host", staging, device)
        return same_kind(staging.to(device), original)


@contextmanager
def _ordered(source: torch.device, targets: Iterable[torch.device]) -> Iterator[None]:
    """Copies from the source to the targets, which the block launches, come after what their current streams do.

    What the source's stream is given next comes after them too. The targets' streams need not wait for the source's:
    the host has waited for it.
    """
    streams = current_streams([source, *targets])
    sending = streams.pop(source, None)
    if sending is None:  # the source is in host memory
        yield
        return
    for receiving in streams.values():
        Event(receiving).make_wait(sending)
    yield
    for receiving in streams.values():
        Event(receiving).make_wait(sending)


@cache
def can_pin(device_type: str) -> bool:
    """True if the backend has pinned host memory. torch has no question for it, so this tries."""
    try:
        return torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:
        return False


class ThroughHost(Transport):
    """Every copy between accelerators goes through the host."""

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See the function `send`; on the tensor's own device it makes a clone."""
        return send(tensor, device, own=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """A source on the device of ``target`` is copied directly."""
        with _ordered(source.device, [target.device]):
            target.copy_(send(source, target.device))

    def broadcast_flat(self, source: Tensor, buffers: Sequence[Tensor]) -> None:
        """One copy to the host, and one from there to each device."""
        if buffers:
            with _ordered(source.device, [buffer.device for buffer in buffers]):
                staged = send(source, CPU)
                for buffer in buffers:
                    note_copy("host", staged, buffer.device)
                    buffer.copy_(staged)
