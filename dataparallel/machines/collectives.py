"""Collectives of a group, as calls that return at once. `Transfer.wait` gives the result.

The issuing thread calls them, or a thread while the launcher has nothing under way: all ranks have to issue the same
collectives in the same order. Nothing here checks that; ``launcher`` does. A tensor is given as it is, which is right
if the calling thread's current stream has computed it, or staged by the thread whose stream has (``staging``).

Tensors that the group cannot send travel through host memory. Collectives that only move values move bytes, so they
take every dtype.

NCCL: torch's documentation says that a collective runs on a stream of NCCL's own, behind what the launching thread's
current stream has been given, and that ``Work.wait`` makes the current stream wait for it. So the launch is made on a
stream that is kept for this, after it has waited for the staging's event; the streams that compute wait for nothing
until the result is taken. The result belongs to the stream that takes it. What is sent is held until then, and belongs
to the stream that has staged it, which waits then too. So ``record_stream`` is not needed, with which a host that is
ahead would hold memory that nothing uses any more. This has not run on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel.machines.backend import Group
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.staging import Staged, stage
from dataparallel.machines.waiting import Check, wait_for
from dataparallel.streams.current import kept_stream, streams_set

__all__ = [
    "Operator",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
]

Operator = Literal["sum", "max", "min", "product"]

OPERATORS = {
    "sum": distributed.ReduceOp.SUM,
    "max": distributed.ReduceOp.MAX,
    "min": distributed.ReduceOp.MIN,
    "product": distributed.ReduceOp.PRODUCT,
}


class Transfer:
    """A collective that has been issued.

    Args:
        group: the machines.
        work: torch's.
        staged: what is sent; held until the result is taken.
        result: what the collective writes.
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
        wait_for(self._work, check)
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
        return self._staged.with_host(self._result)


def all_reduce(group: Group, tensor: Tensor | Staged, op: Operator = "sum") -> Transfer:
    """The sum, maximum, minimum or product over ranks. In place if the tensor can be sent directly.

    With gloo, a sum of fractions adds them in the order of ranks. So the same numbers give the same bits in any run.
    """
    staged = _staged(group, tensor)
    operator = OPERATORS[op]
    is_exact = group.size <= 2 or not staged.host.is_floating_point()
    if op == "sum" and not is_exact and group.backends.get(staged.host.device.type) == "gloo":
        return _sum_in_rank_order(group, staged)
    with _launching(staged):
        work = distributed.all_reduce(staged.host, operator, group=group.group, async_op=True)
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


def broadcast(group: Group, tensor: Tensor | Staged, source: int = 0) -> Transfer:
    """The values of the rank ``source`` of the group. In place if the tensor can be sent directly."""
    staged = _staged(group, tensor)
    with _launching(staged):
        work = distributed.broadcast(_bytes(staged.host), group=group.group, group_src=source, async_op=True)
    return Transfer(group, work, staged, staged.host)


def all_gather(group: Group, tensor: Tensor | Staged) -> Transfer:
    """The flat tensors of all ranks, one after the other: 1-D, of as many elements on every rank."""
    staged = _staged(group, tensor, lambda numel: group.size * numel)
    with _launching(staged):
        work = distributed.all_gather_into_tensor(
            _bytes(_room(staged)), _bytes(staged.host), group=group.group, async_op=True
        )
    return Transfer(group, work, staged, _room(staged))


def reduce_scatter(group: Group, tensor: Tensor | Staged) -> Transfer:
    """This rank's part of the sum: 1-D, of ``size * n`` elements on every rank, to ``n``."""
    staged = _staged(group, tensor, lambda numel: numel // group.size)
    with _launching(staged):
        work = distributed.reduce_scatter_tensor(_room(staged), staged.host, group=group.group, async_op=True)
    return Transfer(group, work, staged, _room(staged))


def all_to_all(group: Group, tensor: Tensor | Staged, send: Sequence[int], receive: Sequence[int]) -> Transfer:
    """What each rank has for this one, in their order.

    Args:
        group: the machines.
        tensor: 1-D, of one dtype on all ranks: what goes to each rank, one after the other.
        send: how many elements go to each rank.
        receive: how many elements come from each.
    """
    staged = _staged(group, tensor, lambda _: sum(receive))
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


def _staged(group: Group, tensor: Tensor | Staged, receives: Callable[[int], int] | None = None) -> Staged:
    if isinstance(tensor, Staged):
        return tensor
    return stage(group, tensor, None if receives is None else receives(tensor.numel()))


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
