"""`stage`: makes a tensor ready to be sent by another thread, the issuing one.

The thread that has computed a tensor stages it, and knows the streams. The issuing thread sends it:

- on the CPU: there is nothing to order.
- on a device that the group cannot send: the copy to host memory, pinned where the backend has that, is launched here,
  on the current stream of the calling thread. The issuing thread waits for an event behind it.
- on a device that NCCL sends: an event is recorded on that stream, for which the stream of the launch waits.

What is received is allocated here, too, for the stream that takes it. So its memory can be used again as soon as the
result is dropped. The staged tensor is held until the result is taken. A result that comes through host memory
may be taken on any stream: `Staged.arrive` orders it behind the event. ``collectives`` stages what is not staged yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dataparallel._torch import current_stream_at
from dataparallel.comm.host import can_pin
from dataparallel.devices import CPU
from dataparallel.machines.backend import Group
from dataparallel.streams.current import Event, streams_set

__all__ = ["Staged", "stage"]


class Staged:
    """A tensor that can be sent.

    Attributes:
        tensor: what was given.
        host: what is sent: the tensor itself, or its copy in host memory.
        event: behind the copy, or behind what has computed the tensor; `None` on the CPU.
        is_copied: a copy in host memory is sent.
        room: what is received is written there, if it does not take the place of what is sent.
        is_free: behind the former uses of ``room``, if another stream than that of ``event`` has made them.
        stream: that of ``event``, to which the memory of ``tensor`` belongs.
    """

    def __init__(
        self,
        tensor: Tensor,
        host: Tensor,
        event: Event | None,
        is_copied: bool,
        room: Tensor | None = None,
        is_free: Event | None = None,
        stream: torch.Stream | None = None,
    ) -> None:
        self.tensor, self.host, self.event, self.is_copied = tensor, host, event, is_copied
        self.room, self.is_free, self.stream = room, is_free, stream

    def with_host(self, host: Tensor) -> Staged:
        """The same with something else to send, which was received for it."""
        return Staged(self.tensor, host, self.event, self.is_copied, stream=self.stream)

    def arrive(self, result: Tensor) -> Tensor:
        """``result`` in host memory, copied to the tensor's device on the current stream.

        torch's host allocator holds the pinned memory until the copy is done.
        """
        device = self.tensor.device
        assert self.event is not None
        self.event.make_wait(current_stream_at(device.index))
        return result.to(device, non_blocking=True)


def stage(
    group: Group,
    tensor: Tensor,
    receives: int | None = None,
    taken_on: Mapping[torch.device, torch.Stream] | None = None,
) -> Staged:
    """``tensor`` ready for a collective of ``group``; it must not be written to until the result is taken.

    Args:
        group: the machines.
        tensor: what is sent, computed on the current stream.
        receives: how many elements come, if they do not take the place of the tensor.
        taken_on: streams on which what comes is taken, if not on the current ones. Only NCCL needs to know.

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
    if device != CPU and group.is_nccl(device):
        room, is_free = None, None
        if receives is not None:
            with streams_set(taken_on or {}):
                room, is_free = tensor.new_empty(receives), Event(current_stream_at(device.index))
        stream = current_stream_at(device.index)
        return Staged(tensor, tensor, Event(stream), False, room, is_free, stream)
    host, is_pinned = tensor, device != CPU and can_pin(device.type)
    if device != CPU:
        host = torch.empty_like(tensor, device=CPU, pin_memory=is_pinned)
        host.copy_(tensor, non_blocking=is_pinned)
    room = None if receives is None else torch.empty(receives, dtype=tensor.dtype, pin_memory=is_pinned)
    event = None if device == CPU else Event(current_stream_at(device.index))
    return Staged(tensor, host, event, device != CPU, room)
