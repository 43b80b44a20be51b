"""`Control`: what the ranks of a line say to each other, small values over gloo in host memory.

Each line has connections of its own, which nothing else uses. They are made beside torch's process groups: so they
exist for a group that has only NCCL, need no device, and answer while a collective of the group is under way. All ranks
make the same calls in the same order. ``line`` and ``agreement`` make them.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.futures import Future

from dataparallel.machines.backend import Group
from dataparallel.machines.waiting import Check, wait_for_future

__all__ = ["Control", "Steps", "waited"]

_SHORT, _OF_LENGTH = 1024, 8  # bytes of the first message, and of the length in it

Steps = Generator[Future[Any], None, Any]
"""Waits for each future that it yields, and returns a result. The thread that drives it decides how it waits."""


class Control:
    """The connections of one line. Making it blocks until all ranks have come, or for the group's timeout.

    Args:
        group: whose ranks they are.
        name: of the line; equal on all ranks, and given once.
    """

    def __init__(self, group: Group, name: str) -> None:
        self.size = group.size
        store = distributed.distributed_c10d.PrefixStore(f"dataparallel/{name}", group.store)
        timeout = timedelta(seconds=group.timeout)
        self._gloo: Any = distributed.ProcessGroupGloo(store, group.rank, group.size, timeout)

    def maximum(self, values: Tensor) -> Steps:
        """The largest values that any rank has, in place; on the CPU, of one size on all ranks."""
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        yield self._gloo.allreduce([values], options).get_future()
        return values

    def number(self, proposed: int) -> Steps:
        """The largest number that any rank proposes."""
        said = yield from self.maximum(torch.tensor([proposed]))
        return int(said)

    def all(self, value: Any) -> Steps:
        """What each rank gives, in their order; anything that can be pickled. One message, if it is short on all."""
        data = pickle.dumps(value)
        first = len(data).to_bytes(_OF_LENGTH, "little") + data
        rows = yield from self._rows(first[:_SHORT], _SHORT)
        lengths = [_OF_LENGTH + int.from_bytes(row[:_OF_LENGTH], "little") for row in rows]
        if max(lengths) > _SHORT:
            rest = yield from self._rows(first[_SHORT:], max(lengths) - _SHORT)
            rows = [row + more for row, more in zip(rows, rest, strict=True)]
        return [pickle.loads(row[_OF_LENGTH:length]) for row, length in zip(rows, lengths, strict=True)]

    def _rows(self, data: bytes, size: int) -> Steps:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        yield self._gloo.allgather([rows], [own]).get_future()
        return [row.numpy().tobytes() for row in rows]


def waited(steps: Steps, check: Check) -> Any:
    """The result, for which the calling thread waits."""
    try:
        future = next(steps)
        while True:
            wait_for_future(future, check)
            future = steps.send(future.value())
    except StopIteration as end:
        return end.value
