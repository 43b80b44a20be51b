"""Collectives of a group, as calls that return at once. `Transfer.wait` gives the result.

The launcher's thread calls them, or a thread while the launcher has nothing under way: all ranks have to issue the same
collectives in the same order. Nothing here checks that; ``launcher`` does. A tensor is given as it is, which is right
if the calling thread's current stream has computed it, or staged by the thread whose stream has (``staging``).

Tensors that the group cannot send travel through host memory. Collectives that only move values move bytes, so they
take every dtype.

NCCL: torch's documentation says that a collective runs on a stream of NCCL's own, behind what the launching thread's
current stream has been given, and that ``Work.wait`` makes the current stream wait for it. So the launch is made on a
stream that is kept for this, after it has waited for the staging's event; the streams that compute wait for nothing
until the result is taken. The launch lock of ``comm/nccl`` is held during the launch, because NCCL forbids launches
from several threads at once. This has not run on GPUs.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from dataparallel._torch import current_stream_at
from dataparallel.comm import nccl
from dataparallel.machines.backend import Group
from dataparallel.machines.errors import MachinesError
from dataparallel.machines.staging import Staged, stage
from dataparallel.machines.waiting import Check, wait_for
from dataparallel.streams.current import kept_stream, streams_set

__all__ = [
    "Operator",
    "Transfer",
    "all_gather",
    "all_gather_objects",
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
        work: torch's.
        staged: what is sent; held until the result is taken.
        result: what the collective writes.
        out: where the result is to be, if it comes through host memory.
        is_on_stream: if the collective runs on a stream (NCCL), so that the host does not wait.
    """

    def __init__(
        self,
        work: distributed.Work,
        staged: Staged,
        result: Tensor,
        out: Tensor | None = None,
        is_on_stream: bool = False,
    ) -> None:
        self._work, self._staged, self._result, self._out = work, staged, result, out
        self._is_on_stream = is_on_stream

    def wait(self, check: Check = lambda: None) -> Tensor:
        """The result, on the device of the tensor that was given, for the calling thread's current stream.

        The host waits until it has arrived; with NCCL the stream does. ``check`` is called several times a second while
        the host waits, and ends the wait if it raises.
        """
        if self._is_on_stream:
            self._work.wait()
            # Allocated on the stream of the launches.
            self._result.record_stream(current_stream_at(self._result.device.index))
            return self._result
        wait_for(self._work, check)
        if self._staged.is_copied:
            return self._staged.arrive(self._result, self._out)
        return self._result


def all_reduce(group: Group, tensor: Tensor | Staged, op: Operator = "sum") -> Transfer:
    """The sum, maximum, minimum or product over ranks. In place if the tensor can be sent directly.

    With gloo, a sum of fractions adds them in the order of ranks. So the same numbers give the same bits in any run.
    """
    staged = _staged(group, tensor)
    operator = OPERATORS[op]
    is_exact = group.size <= 2 or not staged.host.is_floating_point()
    if op == "sum" and not is_exact and group.backends.get(staged.host.device.type) == "gloo":
        return _sum_in_rank_order(group, staged)
    with _launching(group, staged):
        work = distributed.all_reduce(staged.host, operator, group=group.group, async_op=True)
    return _transfer(group, work, staged, staged.host)


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
    with _launching(group, staged):
        work = distributed.all_to_all_single(rows.view(-1), host, [own] * size, sizes, group=group.group, async_op=True)
    _issued(work).wait()
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    spread = total.repeat(size)
    work = distributed.all_to_all_single(host, spread, sizes, [own] * size, group=group.group, async_op=True)
    return _transfer(group, work, staged, staged.host)


def broadcast(group: Group, tensor: Tensor | Staged, source: int = 0) -> Transfer:
    """The values of the rank ``source`` of the group. In place if the tensor can be sent directly."""
    staged = _staged(group, tensor)
    with _launching(group, staged):
        work = distributed.broadcast(_bytes(staged.host), group=group.group, group_src=source, async_op=True)
    return _transfer(group, work, staged, staged.host)


def all_gather(group: Group, tensor: Tensor | Staged, out: Tensor | None = None) -> Transfer:
    """The flat tensors of all ranks, one after the other.

    Args:
        group: the machines.
        tensor: 1-D, with as many elements on every rank.
        out: 1-D, on the same device, with room for all of them. Written on the stream that is current in ``wait``, if
            the tensor goes through host memory.
    """
    staged = _staged(group, tensor)
    host = staged.host
    with _launching(group, staged):
        if out is not None and not staged.is_copied:
            whole = out
        else:
            pinned = staged.is_copied and host.is_pinned()
            whole = torch.empty(group.size * host.numel(), dtype=host.dtype, device=host.device, pin_memory=pinned)
        work = distributed.all_gather_into_tensor(_bytes(whole), _bytes(host), group=group.group, async_op=True)
    return _transfer(group, work, staged, whole, out)


def reduce_scatter(group: Group, tensor: Tensor | Staged) -> Transfer:
    """This rank's part of the sum: 1-D, of ``size * n`` elements on every rank, to ``n``."""
    staged = _staged(group, tensor)
    host = staged.host
    with _launching(group, staged):
        pinned = staged.is_copied and host.is_pinned()
        part = torch.empty(host.numel() // group.size, dtype=host.dtype, device=host.device, pin_memory=pinned)
        work = distributed.reduce_scatter_tensor(part, host, group=group.group, async_op=True)
    return _transfer(group, work, staged, part)


def all_to_all(group: Group, tensor: Tensor | Staged, send: Sequence[int], receive: Sequence[int]) -> Transfer:
    """What each rank has for this one, in their order.

    Args:
        group: the machines.
        tensor: 1-D, of one dtype on all ranks: what goes to each rank, one after the other.
        send: how many elements go to each rank.
        receive: how many elements come from each.
    """
    staged = _staged(group, tensor)
    host, bytes_each = staged.host, staged.host.element_size()
    with _launching(group, staged):
        pinned = staged.is_copied and host.is_pinned()
        received = torch.empty(sum(receive), dtype=host.dtype, device=host.device, pin_memory=pinned)
        work = distributed.all_to_all_single(
            _bytes(received),
            _bytes(host),
            [bytes_each * size for size in receive],
            [bytes_each * size for size in send],
            group=group.group,
            async_op=True,
        )
    return _transfer(group, work, staged, received)


def all_gather_objects(group: Group, value: Any, check: Check = lambda: None) -> list[Any]:
    """What each rank gives, in their order; anything that can be pickled. The calling thread waits."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = all_gather(group, torch.tensor([data.numel()], device=group.small_device)).wait(check).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = all_gather(group, padded.to(group.small_device)).wait(check).cpu().view(group.size, -1)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _staged(group: Group, tensor: Tensor | Staged) -> Staged:
    return tensor if isinstance(tensor, Staged) else stage(group, tensor)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def _launching(group: Group, staged: Staged) -> AbstractContextManager[object]:
    """Inside, the tensor is ready to be sent, and with NCCL no other thread launches."""
    stack = ExitStack()
    if staged.event is None:
        return stack
    if staged.is_copied:
        staged.event.synchronize()
        return stack
    device = staged.host.device
    stream = kept_stream(device, "collectives")
    staged.event.make_wait(stream)
    stack.enter_context(nccl.launching())
    stack.enter_context(streams_set({device: stream}))
    return stack


def _transfer(
    group: Group, work: distributed.Work | None, staged: Staged, result: Tensor, out: Tensor | None = None
) -> Transfer:
    return Transfer(_issued(work), staged, result, out, group.is_nccl(staged.host.device))


def _issued(work: distributed.Work | None) -> distributed.Work:
    if work is None:  # what torch returns to ranks outside of the group
        raise MachinesError(
            "the process group has been destroyed: destroy_process_group belongs after the last step, and a new group "
            "needs the form to be applied again"
        )
    return work
