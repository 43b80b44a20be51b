"""Collectives of a group, as calls that return at once. All ranks have to issue the same ones in the same order, which
the launcher sees to. What only moves values moves bytes, so it takes every dtype.

A tensor is staged first, by the thread whose stream has computed it. NCCL's part has not run on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel._torch import current_stream_at
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, kept_stream, streams_set
from dataparallel.devices import CPU
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.health import SLICE, Check

if TYPE_CHECKING:
    from dataparallel.machines.group import Group

ALIGNED = 16
"""Bytes, the largest element of any dtype: where tensors of several dtypes begin in one message."""


@dataclass
class Staged:
    """A tensor that another thread can send, and that is held until the result is taken.

    Attributes:
        tensor: what was given.
        host: what is sent: the tensor itself, or its copy in host memory.
        event: behind the copy, or behind what has computed the tensor; `None` on the CPU.
        room: what is received is written there, if it does not take the place of what is sent.
        is_free: behind the former uses of ``room``, if another stream than that of ``event`` has made them.
        stream: that of ``event``, to which the memory of ``tensor`` belongs.
    """

    tensor: Tensor
    host: Tensor
    event: Event | None
    room: Tensor | None = None
    is_free: Event | None = None
    stream: torch.Stream | None = None

    @property
    def is_copied(self) -> bool:
        """A copy in host memory is sent."""
        return self.host.device != self.tensor.device

    def arrive(self, result: Tensor) -> Tensor:
        """``result`` in host memory, copied to the tensor's device on the current stream, whichever that is.

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

    What the group cannot send is copied to host memory here, on the current stream. What is received is allocated here
    too, for the stream that takes it: so its memory can be used again as soon as the result is dropped.

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
        return Staged(tensor, tensor, Event(stream), room, is_free, stream)
    is_pinned = device != CPU and can_pin(device.type)
    room = None if receives is None else torch.empty(receives, dtype=tensor.dtype, pin_memory=is_pinned)
    if device == CPU:
        return Staged(tensor, tensor, None, room)
    host = torch.empty_like(tensor, device=CPU, pin_memory=is_pinned)
    host.copy_(tensor, non_blocking=is_pinned)
    return Staged(tensor, host, Event(current_stream_at(device.index)), room)


class Transfer:
    """A collective that has been issued.

    With NCCL it runs behind a stream that is kept for this and has waited for the staging's event. So the streams that
    compute wait for nothing until the result is taken. The result belongs to the stream that takes it, and what is sent
    to the stream that has staged it, which waits then too. So ``record_stream`` is not needed, with which a host that
    is ahead would hold unused memory.
    """

    def __init__(self, group: Group, work: distributed.Work | None, staged: Staged, result: Tensor) -> None:
        if work is None:  # what torch returns to ranks outside of the group
            raise MachinesError(
                "the process group has been destroyed: destroy_process_group belongs after the last step, and a new "
                "group needs the form to be applied again"
            )
        self._work, self._staged, self._result = work, staged, result
        self._is_on_stream = group.is_nccl(result.device)
        self._future: Future[object] | None = None

    def wait(self, check: Check = lambda: None) -> Tensor:
        """The result, on the device of the tensor that was given, for the calling thread's current stream.

        The host waits until it has arrived. With NCCL the stream does, to which the memory of the result has to belong.
        ``check`` is called several times a second while the host waits, and ends the wait if it raises.
        """
        if self._is_on_stream:
            stream = self._staged.stream
            assert stream is not None
            # The memory of what is sent goes back to the stream that has staged it, so that one waits too.
            with streams_set({stream.device: stream}):
                self._work.wait()
            self._work.wait()
            return self._result
        _wait_for(self._work, check)
        return self._staged.arrive(self._result) if self._staged.is_copied else self._result

    def when_done(self, call: Callable[[object], None]) -> None:
        """``call`` is called by another thread when `has_arrived` becomes true."""
        if self._is_on_stream:
            return
        try:
            self._future = self._work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none: it ends in its wait
            return
        self._future.add_done_callback(call)

    def has_arrived(self) -> bool:
        """True if `received` does not block, or cannot be told when."""
        return self._future is None or self._future.done()

    def received(self) -> Staged:
        """What has arrived, to be sent on by the thread that has issued this."""
        if self._is_on_stream:
            device = self._result.device
            with streams_set({device: kept_stream(device, "collectives")}):
                self._work.wait()
        else:
            self._work.wait()  # it is done, or raises its error
        return Staged(self._staged.tensor, self._result, self._staged.event, stream=self._staged.stream)


def all_reduce(group: Group, staged: Staged) -> Transfer:
    """The sum over ranks. In place if the tensor can be sent directly.

    With gloo, fractions are added in the order of ranks. So the same numbers give the same bits in any run.
    """
    is_exact = group.size <= 2 or not staged.host.is_floating_point()
    if not is_exact and group.backends.get(staged.host.device.type) == "gloo":
        return _sum_in_rank_order(group, staged)
    with _launching(staged):
        work = distributed.all_reduce(staged.host, group=group.group, async_op=True)
    return Transfer(group, work, staged, staged.host)


def _sum_in_rank_order(group: Group, staged: Staged) -> Transfer:
    """The sum over three ranks or more, added in their order. Returns when the first of two exchanges is done.

    gloo's own sum starts at a rank that depends on the position in the tensor. After a restart gradients travel in
    other buckets, so their last bits would differ. Here each rank adds up one part and sends the result to all others.
    The two exchanges send as many bytes as gloo's own sum.
    """
    host, size = staged.host.view(-1), group.size
    sizes = [host.numel() // size + (rank < host.numel() % size) for rank in range(size)]
    own = sizes[group.rank]
    rows = host.new_empty(size, own)
    with _launching(staged):
        work = distributed.all_to_all_single(rows.view(-1), host, [own] * size, sizes, group=group.group, async_op=True)
    Transfer(group, work, staged, rows).received()
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    spread = total.repeat(size)
    work = distributed.all_to_all_single(host, spread, sizes, [own] * size, group=group.group, async_op=True)
    return Transfer(group, work, staged, staged.host)


def broadcast(group: Group, staged: Staged) -> Transfer:
    """The values of the group's rank 0. In place if the tensor can be sent directly."""
    with _launching(staged):
        work = distributed.broadcast(_bytes(staged.host), group=group.group, group_src=0, async_op=True)
    return Transfer(group, work, staged, staged.host)


def all_gather(group: Group, staged: Staged) -> Transfer:
    """The flat tensors of all ranks, one after the other: 1-D, of as many elements on every rank."""
    with _launching(staged):
        work = distributed.all_gather_into_tensor(
            _bytes(_room(staged)), _bytes(staged.host), group=group.group, async_op=True
        )
    return Transfer(group, work, staged, _room(staged))


def reduce_scatter(group: Group, staged: Staged) -> Transfer:
    """This rank's part of the sum: 1-D, of ``size * n`` elements on every rank, to ``n``."""
    with _launching(staged):
        work = distributed.reduce_scatter_tensor(_room(staged), staged.host, group=group.group, async_op=True)
    return Transfer(group, work, staged, _room(staged))


def all_to_all(group: Group, staged: Staged, send: Sequence[int], receive: Sequence[int]) -> Transfer:
    """What each rank has for this one, in their order: 1-D, of one dtype on all ranks.

    ``send`` and ``receive``: how many elements go to each rank and come from it, one after the other.
    """
    bytes_each = staged.host.element_size()
    with _launching(staged):
        work = distributed.all_to_all_single(
            _bytes(_room(staged)),
            _bytes(staged.host),
            [bytes_each * size for size in receive],
            [bytes_each * size for size in send],
            group=group.group,
            async_op=True,
        )
    return Transfer(group, work, staged, _room(staged))


def _room(staged: Staged) -> Tensor:
    assert staged.room is not None, "stage() was not told how much is received"
    return staged.room


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def _launching(staged: Staged) -> AbstractContextManager[object]:
    """Inside, the tensor is ready to be sent."""
    if staged.event is None:
        return nullcontext()
    if staged.is_copied:
        staged.event.synchronize()
        return nullcontext()
    device = staged.host.device
    stream = kept_stream(device, "collectives")
    for event in (staged.event, staged.is_free):
        if event is not None:
            event.make_wait(stream)
    return streams_set({device: stream})


def _wait_for(work: distributed.Work, check: Check) -> None:
    """Until the collective of a backend that works on the host has ended, or ``check`` raises."""
    piece = timedelta(seconds=SLICE)
    while True:
        try:
            work.wait(piece)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait(piece)  # it has ended just now, or raises its own error
                return
        check()
