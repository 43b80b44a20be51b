"""`Transfer`: a tensor that is sent to other ranks, and what comes for it. All but sums send bytes, of every dtype.

`stage` prepares a tensor first, in the thread whose stream has computed it. NCCL's part has not run on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from dataparallel._torch import all_gather_of, current_stream_at, reduce_scatter_of
from dataparallel.comm.checks import tensor_split_sizes
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, kept_stream, streams_set
from dataparallel.devices import CPU

SLICE = 0.2
"""Seconds between two checks of a wait for failures and for the timeout."""


@dataclass
class Link:
    """The connections of some ranks in one lane: torch's backends for host memory, and for devices with NCCL."""

    rank: int
    size: int
    gloo: Any
    nccl: Any = None

    def backend(self, tensor: Tensor) -> Any:
        return self.gloo if tensor.device == CPU else self.nccl


@dataclass
class Transfer:
    """A tensor that another thread can send. It holds the memory until the result is taken.

    A collective is a method: the issuing thread calls it with a `Link`, and it returns the transfer at once.

    With NCCL the collective is ordered after a stream that is kept for collectives and has waited for ``event``. So
    compute streams do not wait before the result is taken. The result's memory belongs to the stream that takes it, and
    the sent memory to the stream that has staged it, which waits then too. ``record_stream`` would hold unused memory
    while the host is ahead.

    Attributes:
        payload: what is sent: the tensor that was given to `stage`, or a copy of it in host memory.
        event: comes after the copy, or after the launches that have computed the tensor; ``None`` on the CPU.
        receive_buffer: the result is written here. ``None`` if the result replaces ``payload``.
        is_free: an event after former uses of the receive buffer, which may be on another stream than ``event``.
        stream: with NCCL the stream of ``event``, to which the sent memory belongs.
    """

    tensor: Tensor
    payload: Tensor
    event: Event | None = None
    receive_buffer: Tensor | None = None
    is_free: Event | None = None
    stream: torch.Stream | None = None
    _work: Any = None
    _total: Tensor | None = None  # for the sum of what comes from each rank
    is_part_of_sum: bool = False

    @property
    def is_copied(self) -> bool:
        """True if a copy in host memory is sent."""
        return self.payload.device != self.tensor.device

    def copy_result(self, result: Tensor) -> Tensor:
        """Copies ``result`` from host memory to the tensor's device, on the stream that is current there."""
        device = self.tensor.device
        assert self.event is not None
        self.event.make_wait(current_stream_at(device.index))
        return result.to(device, non_blocking=True)  # torch's host allocator holds pinned memory for so long

    # ---- collectives

    def sum(self, link: Link) -> Transfer:
        """The sum over ranks, in place if the tensor can be sent directly.

        With gloo it is added in rank order, so equal inputs give equal bits. gloo's own sum of more than two begins at
        a rank that depends on the position in the tensor. So this sums the part of each rank, and `send_sum` follows.
        """
        if link.size > 2 and self.payload.device == CPU:
            self.is_part_of_sum = True
            return self.reduce_scatter(link)
        flat, self.receive_buffer = _real(self.payload), None
        return self._issue(lambda: link.backend(flat).allreduce([flat]))

    def broadcast(self, link: Link) -> Transfer:
        """The values of rank 0, in place if the tensor can be sent directly."""
        flat = _bytes(self.payload)
        return self._issue(lambda: link.backend(flat).broadcast([flat], distributed.BroadcastOptions()))

    def all_gather(self, link: Link) -> Transfer:
        """The 1-D tensors of all ranks, one after the other. All have the same size."""
        flat, received = _bytes(self.payload), _bytes(self._result)
        return self._issue(lambda: all_gather_of(link.backend(flat))(received, flat))

    def all_to_all(self, send: Sequence[int], receive: Sequence[int], link: Link) -> Transfer:
        """Sends a slice of a tensor to each rank. The result is the slices from all ranks, in rank order.

        ``send`` and ``receive``: how many elements go to each rank, and come from each. All ranks have the same dtype.
        """
        received, flat, each = _bytes(self._result), _bytes(self.payload), self.payload.element_size()
        sizes = [each * size for size in receive], [each * size for size in send]
        return self._issue(lambda: link.backend(flat).alltoall_base(received, flat, *sizes))

    def reduce_scatter(self, link: Link) -> Transfer:
        """This rank's slice of the sum over ranks of 1-D tensors, in as many near-equal slices."""
        if self.payload.device != CPU:
            flat, received = _real(self.payload), _real(self._result)
            return self._issue(lambda: reduce_scatter_of(link.nccl)(received, flat))
        sizes = tensor_split_sizes(self.payload.numel(), link.size)
        own = sizes[link.rank]
        self._total = self.payload.new_empty(own) if self.receive_buffer is None else self.receive_buffer
        self.receive_buffer = self.payload.new_empty(link.size * own)
        return self.all_to_all(sizes, [own] * link.size, link)

    def send_sum(self, link: Link) -> Transfer:
        """Sends the part of this rank, which has arrived, to all, in place of what was given."""
        whole, part = self.payload, self.send_on().payload
        self.payload, self.receive_buffer = part.repeat(link.size), whole
        return self.all_to_all([part.numel()] * link.size, tensor_split_sizes(whole.numel(), link.size), link)

    def _issue(self, begin: Callable[[], Any]) -> Transfer:
        """The payload is ready to be sent: the host waits for a copy, or the stream that NCCL waits for is current."""
        if self.is_copied and self.event is not None:
            self.event.synchronize()
        streams = {}
        if self.stream is not None:
            streams = {self.stream.device: kept_stream(self.stream.device, "collectives")}
            for event in (self.event, self.is_free):
                if event is not None:
                    event.make_wait(streams[self.stream.device])
        with streams_set(streams):
            self._work = begin()
        return self

    # ---- results

    @property
    def _result(self) -> Tensor:
        return self.payload if self.receive_buffer is None else self.receive_buffer

    def wait(self, check: Callable[[], object] = lambda: None) -> Tensor:
        """The result, on the staged tensor's device, ready for the calling thread's current stream.

        The host waits, and calls ``check`` several times a second, which may raise. With NCCL the current stream waits,
        and it has to own the result's memory.
        """
        if self.stream is not None:
            with streams_set({self.stream.device: self.stream}):  # the sent memory goes back to this stream
                self._work.wait()
            self._work.wait()
            return self._result
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=SLICE))
            except RuntimeError:
                check()
        self._work.wait()  # raises its error
        self._add_up()
        return self.copy_result(self._result) if self.is_copied else self._result

    def has_arrived(self) -> bool:
        """True if `send_on` does not block."""
        return self.stream is not None or bool(self._work.is_completed())

    def send_on(self) -> Transfer:
        """The result takes the place of the payload, for the thread that has issued this collective to send it on."""
        with streams_set(
            {} if self.stream is None else {self.stream.device: kept_stream(self.stream.device, "collectives")}
        ):
            self._work.wait()  # on the host it is done, or raises its error
        self._add_up()
        self.payload, self.receive_buffer = self._result, None
        return self

    def _add_up(self) -> None:
        if self._total is not None:
            first, *others = self._result.split(max(1, self._total.numel()))
            self.receive_buffer, self._total = self._total.copy_(first), None
            for row in others:
                self.receive_buffer.add_(row)


def stage(
    machines: Any,
    tensor: Tensor,
    receives: int | None = None,
    taken_on: Mapping[torch.device, torch.Stream] | None = None,
) -> Transfer:
    """Prepares ``tensor`` for a collective of ``machines``. Nobody may write to it until the result is taken.

    If the device has no NCCL, this copies the tensor to host memory, on the current stream. ``receives``: how many
    elements are received, if they do not replace the tensor. ``taken_on``: the streams on which the result is taken, if
    not the current ones: with NCCL the receive buffer is theirs, so that its memory is free once the result is dropped.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()  # a conjugate that is not computed has no bytes of its own
    device, buffer, is_free = tensor.device, None, None
    if machines.is_nccl(device):
        if receives is not None:
            with streams_set(taken_on or {}):
                buffer, is_free = tensor.new_empty(receives), Event(current_stream_at(device.index))
        stream = current_stream_at(device.index)
        return Transfer(tensor, tensor, Event(stream), buffer, is_free, stream)
    is_pinned = device != CPU and can_pin(device.type)
    if receives is not None:
        buffer = torch.empty(receives, dtype=tensor.dtype, device=CPU, pin_memory=is_pinned)
    if device == CPU:
        return Transfer(tensor, tensor, None, buffer)
    host_copy = torch.empty_like(tensor, device=CPU, pin_memory=is_pinned)
    host_copy.copy_(tensor, non_blocking=is_pinned)
    return Transfer(tensor, host_copy, Event(current_stream_at(device.index)), buffer)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    """A flat view. Complex numbers are pairs of real ones, because backends add real numbers only."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
