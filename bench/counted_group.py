"""A process group that counts what crosses the network: gloo behind it.

`register` teaches ``init_process_group`` the backend ``"counted"``. Every group that is made with it, by ``new_group``
too, is a `CountedGroup`, and all groups of the process count into `SENT`. So do connections that a library makes by
``torch.distributed.ProcessGroupGloo`` itself: `CountedGloo` takes its place. Any library that communicates through
``torch.distributed`` is counted alike. Used by benchmarks, and by tests of what is sent. Times nothing: counting takes
time of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["BACKEND", "SENT", "CountedGroup", "register"]

BACKEND = "counted"

# What each rank sends in a collective over `n` ranks by the usual ring, as a part of the bytes of the larger side. From
# PERFORMANCE.md of nccl-tests, "bus bandwidth". A broadcast and a reduction pass each rank but one.
PARTS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


class Sent:
    """The bytes that this rank has sent, by kind of collective, and how many collectives there were."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def clear(self) -> None:
        self.bytes.clear()
        self.calls.clear()

    def add(self, kind: str, ranks: int, larger_side: Any) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += round(PARTS[kind](ranks) * sum(tensor.nbytes for tensor in _tensors(larger_side)))


SENT = Sent()


def _counting(call: Callable[..., Any], method: str, kind: str, larger: int) -> Callable[..., Any]:
    """A method that counts and then calls ``call``. ``larger`` says which argument has the larger side."""

    def count_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        SENT.add(kind, self.size(), args[larger])
        return call(self, *args, **kwargs)

    count_and_call.__name__ = method
    return count_and_call


class CountedGroup(dist.ProcessGroup):
    """Counts each collective into `SENT` and leaves the work to a group with gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        gloo = _Gloo(store, rank, size, timeout)
        self._gloo = dist.ProcessGroup(store, rank, size)
        for group in (self, self._gloo):  # this one too: who looks for the backend and its timeout finds it here
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return BACKEND

    def get_group_store(self) -> Any:
        return self._store

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Has no tensors, so it is not counted."""
        return self._gloo.barrier(*args, **kwargs)


_Gloo = dist.ProcessGroupGloo


class CountedGloo(_Gloo):
    """A connection by gloo that counts what Python calls. What a group sends by it in C++ the group counts."""


def _by_gloo(method: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._gloo, method)(*args, **kwargs)


# Which argument holds the larger side. torch has renamed the flat collectives; both names are counted where they exist.
for _method, _kind, _larger in (
    ("allreduce", "all_reduce", 0),
    ("allreduce_coalesced", "all_reduce", 0),
    ("broadcast", "broadcast", 0),
    ("reduce", "reduce", 0),
    ("allgather", "all_gather", 0),
    ("allgather_coalesced", "all_gather", 0),
    ("_allgather_base", "all_gather", 0),
    ("all_gather_single", "all_gather", 0),
    ("allgather_into_tensor_coalesced", "all_gather", 0),
    ("all_gather_single_coalesced", "all_gather", 0),
    ("reduce_scatter", "reduce_scatter", 1),
    ("_reduce_scatter_base", "reduce_scatter", 1),
    ("reduce_scatter_single", "reduce_scatter", 1),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter", 1),
    ("reduce_scatter_single_coalesced", "reduce_scatter", 1),
    ("gather", "gather", 0),
    ("scatter", "scatter", 1),
    ("alltoall", "all_to_all", 1),
    ("alltoall_base", "all_to_all", 1),
    ("all_to_all_single", "all_to_all", 1),
):
    if hasattr(dist.ProcessGroup, _method):
        setattr(CountedGroup, _method, _counting(_by_gloo(_method), _method, _kind, _larger))
    if hasattr(_Gloo, _method):
        setattr(CountedGloo, _method, _counting(getattr(_Gloo, _method), _method, _kind, _larger))


def register() -> None:
    """Makes ``"counted"`` a backend of this process, for tensors on the CPU. Again is allowed."""
    dist.ProcessGroupGloo = CountedGloo
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, CountedGroup, devices=["cpu"])


def _tensors(nested: Any) -> Iterable[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for each in nested:
            yield from _tensors(each)
