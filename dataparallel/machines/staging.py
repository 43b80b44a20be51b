"""`stage`: makes a tensor ready to be sent by another thread, the launcher's.

The thread that has computed a tensor stages it, and knows the streams. The launcher's thread sends it:

- on the CPU: there is nothing to order.
- on a device that the group cannot send: the copy to host memory, pinned where the backend has that, is launched here,
  on the current stream of the calling thread. The launcher's thread waits for an event behind it.
- on a device that NCCL sends: an event is recorded on that stream, for which the launcher's stream waits.

The staged tensor is held until the result is taken. Who takes a result gets it on the stream that is current then:
`Staged.arrive` orders it behind the event, whatever stream that is. ``collectives`` stages what is not staged yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataparallel._torch import current_stream_at
from dataparallel.comm.host import can_pin
from dataparallel.devices import CPU
from dataparallel.machines.backend import Group
from dataparallel.streams.current import Event

__all__ = ["Staged", "stage"]


class Staged:
    """A tensor that can be sent.

    Attributes:
        tensor: what was given.
        host: what is sent: the tensor itself, or its copy in host memory.
        event: behind the copy, or behind what has computed the tensor; `None` on the CPU.
    """

    def __init__(self, tensor: Tensor, host: Tensor, event: Event | None) -> None:
        self.tensor, self.host, self.event = tensor, host, event

    @property
    def is_copied(self) -> bool:
        """True if a copy in host memory is sent."""
        return self.host is not self.tensor

    def arrive(self, result: Tensor, out: Tensor | None = None) -> Tensor:
        """``result`` in host memory, copied to the tensor's device on the current stream, into ``out`` if given.

        torch's host allocator holds the pinned memory until the copy is done.
        """
        device = self.tensor.device
        stream = current_stream_at(device.index)
        assert self.event is not None
        self.event.make_wait(stream)
        if out is not None:
            return out.copy_(result, non_blocking=True)
        return result.to(device, non_blocking=True)


def stage(group: Group, tensor: Tensor) -> Staged:
    """``tensor`` ready for a collective of ``group``; it must not be written to until the result is taken.

    Raises:
        ValueError: if it is not dense, or not contiguous.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"a collective takes dense contiguous tensors; got layout {tensor.layout} and strides "
            f"{tensor.stride() if tensor.layout is torch.strided else None}: flatten it first"
        )
    device = tensor.device
    if device == CPU:
        return Staged(tensor, tensor, None)
    if group.can_send(device):
        return Staged(tensor, tensor, Event(current_stream_at(device.index)))
    host = torch.empty_like(tensor, device=CPU, pin_memory=can_pin(device.type))
    host.copy_(tensor, non_blocking=host.is_pinned())
    return Staged(tensor, host, Event(current_stream_at(device.index)))
