"""`all_reduce`, `all_gather` and other collectives of a group, which return a `Transfer` at once. The launcher ensures
that all ranks issue the same ones in the same order. All but sums send bytes, so they take every dtype.

`stage` prepares a tensor first, in the thread whose stream has computed it. NCCL's part has not run on GPUs.
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
from dataparallel.comm.checks import tensor_split_sizes
from dataparallel.comm.host import can_pin
from dataparallel.comm.streams.current import Event, kept_stream, streams_set
from dataparallel.devices import CPU
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.health import SLICE, Check

if TYPE_CHECKING:
    from dataparallel.machines.group import MachineGroup


@dataclass
class Staged:
    """A tensor that another thread can send. It holds the memory until the result is taken.

    Attributes:
        tensor: the tensor that was given to `stage`.
        payload: the tensor that is sent: ``tensor`` itself, or a copy of it in host memory.
        event: comes after the copy, or after the launches that have computed ``tensor``; `None` on the CPU.
        receive_buffer: the result is written here. `None` if the result replaces ``payload``.
        is_free: an event after former uses of the receive buffer, which may be on another stream than ``event``.
        stream: the stream of ``event``, to which the memory of ``tensor`` belongs.
    """

    tensor: Tensor
    payload: Tensor
    event: Event | None
    receive_buffer: Tensor | None = None
    is_free: Event | None = None
    stream: torch.Stream | None = None

    @property
    def is_copied(self) -> bool:
        """True if a copy in host memory is sent."""
        return self.payload.device != self.tensor.device

    def copy_result(self, result: Tensor) -> Tensor:
        """Copies ``result`` from host memory to the tensor's device, on the stream that is current there.

        torch's host allocator holds the pinned memory until the copy is done.
        """
        device = self.tensor.device
        assert self.event is not None
        self.event.make_wait(current_stream_at(device.index))
        return result.to(device, non_blocking=True)


def stage(
    group: MachineGroup,
    tensor: Tensor,
    receives: int | None = None,
    taken_on: Mapping[torch.device, torch.Stream] | None = None,
) -> Staged:
    """Prepares ``tensor`` for a collective of ``group``. Nobody may write to it until the result is taken.

    If the group cannot send from the device, this copies the tensor to host memory, on the current stream. It allocates
    the receive buffer for the stream that takes the result, so that its memory is free once the result is dropped.
    ``receives``: how many elements are received, if they do not replace the tensor. ``taken_on``: the streams on which
    the result is taken, if not the current ones. Only NCCL needs this.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()  # a conjugate that is not computed has no bytes of its own
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"a collective takes dense contiguous tensors; got layout {tensor.layout} and strides "
            f"{tensor.stride() if tensor.layout is torch.strided else None}: flatten it first"
        )
    device = tensor.device
    if device != CPU and group.is_nccl(device):
        buffer, is_free = None, None
        if receives is not None:
            with streams_set(taken_on or {}):
                buffer, is_free = tensor.new_empty(receives), Event(current_stream_at(device.index))
        stream = current_stream_at(device.index)
        return Staged(tensor, tensor, Event(stream), buffer, is_free, stream)
    is_pinned = device != CPU and can_pin(device.type)
    buffer = None if receives is None else torch.empty(receives, dtype=tensor.dtype, pin_memory=is_pinned)
    if device == CPU:
        return Staged(tensor, tensor, None, buffer)
    host_copy = torch.empty_like(tensor, device=CPU, pin_memory=is_pinned)
    host_copy.copy_(tensor, non_blocking=is_pinned)
    return Staged(tensor, host_copy, Event(current_stream_at(device.index)), buffer)


class Transfer:
    """A collective that has been issued.

    With NCCL the collective is ordered after a stream that is kept for collectives and has waited for the staging's
    event. So compute streams do not wait before the result is taken. The result's memory belongs to the stream that
    takes it, and the sent memory to the stream that has staged it, which waits then too. So ``record_stream`` is not
    needed, which would hold unused memory while the host is ahead.
    """

    def __init__(self, group: MachineGroup, work: distributed.Work | None, staged: Staged, result: Tensor) -> None:
        if work is None:  # what torch returns to ranks outside of the group
            raise MachinesError(
                "the process group has been destroyed: destroy_process_group belongs after the last step, and a new "
                "group needs the form to be applied again"
            )
        self._work, self._staged, self._result = work, staged, result
        self._is_on_stream = group.is_nccl(result.device)
        self._future: Future[object] | None = None

    def wait(self, check: Check = lambda: None) -> Tensor:
        """The result, on the staged tensor's device, ready for the calling thread's current stream.

        The host waits until the result has arrived. With NCCL the current stream waits, and it has to own the result's
        memory. While the host waits it calls ``check`` several times a second, which may raise.
        """
        if self._is_on_stream:
            stream = self._staged.stream
            assert stream is not None
            # The sent memory goes back to the stream that has staged it, so that stream waits too.
            with streams_set({stream.device: stream}):
                self._work.wait()
            self._work.wait()
            return self._result
        _wait_for(self._work, check)
        return self._staged.copy_result(self._result) if self._staged.is_copied else self._result

    def when_done(self, call: Callable[[object], None]) -> None:
        """Has another thread call ``call`` when `has_arrived` becomes true."""
        if self._is_on_stream:
            return
        try:
            self._future = self._work.get_future()
        except RuntimeError:  # gloo's reduce_scatter has none: it ends in its wait
            return
        self._future.add_done_callback(call)

    def has_arrived(self) -> bool:
        """True if `received` does not block, or if the backend cannot tell."""
        return self._future is None or self._future.done()

    def received(self) -> Staged:
        """The result, staged for the thread that has issued this collective to send it on."""
        if self._is_on_stream:
            device = self._result.device
            with streams_set({device: kept_stream(device, "collectives")}):
                self._work.wait()
        else:
            self._work.wait()  # it is done, or raises its error
        return Staged(self._staged.tensor, self._result, self._staged.event, stream=self._staged.stream)


def all_reduce(group: MachineGroup, staged: Staged) -> Transfer:
    """The sum over ranks, in place if the tensor can be sent directly.

    With gloo, floating-point and complex numbers are added in rank order, so equal inputs give equal bits in every run.
    """
    flat = _real(staged.payload)
    is_exact = group.size <= 2 or not flat.is_floating_point()
    if not is_exact and group.backends.get(flat.device.type) == "gloo":
        return _sum_in_rank_order(group, staged, flat)
    with _launching(staged):
        work = distributed.all_reduce(flat, group=group.group, async_op=True)
    return Transfer(group, work, staged, staged.payload)


def _sum_in_rank_order(group: MachineGroup, staged: Staged, flat: Tensor) -> Transfer:
    """The sum over three ranks or more, added in rank order. Returns when the first of two exchanges is done.

    gloo's own sum begins at a rank that depends on the position in the tensor. After a restart gradients travel in
    other buckets, so their last bits would differ. Here each rank adds up one slice and sends the result to all others.
    The two exchanges send as many bytes as gloo's own sum.
    """
    size = group.size
    sizes = tensor_split_sizes(flat.numel(), size)
    own_sizes = [sizes[group.rank]] * size
    rows = flat.new_empty(size, sizes[group.rank])
    with _launching(staged):
        work = distributed.all_to_all_single(rows.view(-1), flat, own_sizes, sizes, group=group.group, async_op=True)
    Transfer(group, work, staged, rows).received()
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    copies = total.repeat(size)
    work = distributed.all_to_all_single(flat, copies, sizes, own_sizes, group=group.group, async_op=True)
    return Transfer(group, work, staged, staged.payload)


def broadcast(group: MachineGroup, staged: Staged) -> Transfer:
    """The values of the group's rank 0, in place if the tensor can be sent directly."""
    with _launching(staged):
        work = distributed.broadcast(_bytes(staged.payload), group=group.group, group_src=0, async_op=True)
    return Transfer(group, work, staged, staged.payload)


def all_gather(group: MachineGroup, staged: Staged) -> Transfer:
    """The 1-D tensors of all ranks, one after the other. All have the same size."""
    with _launching(staged):
        work = distributed.all_gather_into_tensor(
            _bytes(_receive_buffer(staged)), _bytes(staged.payload), group=group.group, async_op=True
        )
    return Transfer(group, work, staged, _receive_buffer(staged))


def reduce_scatter(group: MachineGroup, staged: Staged) -> Transfer:
    """This rank's slice of the sum over ranks: from 1-D tensors of ``size * n`` elements to ``n`` elements."""
    with _launching(staged):
        work = distributed.reduce_scatter_tensor(
            _real(_receive_buffer(staged)), _real(staged.payload), group=group.group, async_op=True
        )
    return Transfer(group, work, staged, _receive_buffer(staged))


def all_to_all(group: MachineGroup, staged: Staged, send: Sequence[int], receive: Sequence[int]) -> Transfer:
    """Sends a slice of a 1-D tensor to each rank. Returns the slices from all ranks, in rank order.

    ``send`` and ``receive``: how many elements go to each rank, and come from each. All ranks have the same dtype.
    """
    bytes_each = staged.payload.element_size()
    with _launching(staged):
        work = distributed.all_to_all_single(
            _bytes(_receive_buffer(staged)),
            _bytes(staged.payload),
            [bytes_each * size for size in receive],
            [bytes_each * size for size in send],
            group=group.group,
            async_op=True,
        )
    return Transfer(group, work, staged, _receive_buffer(staged))


def _receive_buffer(staged: Staged) -> Tensor:
    assert staged.receive_buffer is not None, "stage() was not told how much is received"
    return staged.receive_buffer


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    """A flat view. Complex numbers are pairs of real ones, because backends add real numbers only."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def _launching(staged: Staged) -> AbstractContextManager[object]:
    """Makes the payload ready to be sent: the host waits for a copy, or the stream that NCCL waits for is current."""
    if staged.event is None:
        return nullcontext()
    if staged.is_copied:
        staged.event.synchronize()
        return nullcontext()
    device = staged.payload.device
    stream = kept_stream(device, "collectives")
    for event in (staged.event, staged.is_free):
        if event is not None:
            event.make_wait(stream)
    return streams_set({device: stream})


def _wait_for(work: distributed.Work, check: Check) -> None:
    """Waits until a collective of a backend that works on the host has ended. ``check`` may raise meanwhile."""
    timeout = timedelta(seconds=SLICE)
    while True:
        try:
            work.wait(timeout)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait(timeout)  # the collective has ended just now, or raises its own error
                return
        check()
