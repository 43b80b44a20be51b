"""The memory of the graphs of one slot: `ForwardPool`, which captures of forwards share, and `BackwardMemory`.

What a capture frees is used again by captures in its pool that come later. So a launch writes over what these have
left there, and is not made while one of them still needs it. ``captured`` and ``calls`` use this file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dataparallel.weak_members import WeakMembers

if TYPE_CHECKING:
    from dataparallel.replicas.graphs.captured import Captured


class ForwardPool:
    """A pool, and the captures whose forwards are in it, in the order in which they were made.

    Attributes:
        pool: the memory of their graphs.
    """

    def __init__(self) -> None:
        self.pool = Pool()
        self._captures: WeakMembers[Captured] = WeakMembers()

    def add(self, captured: Captured) -> None:
        """Notes that a forward was captured here."""
        self._captures.add(captured)

    def may_launch(self, captured: Captured) -> bool:
        """True if no capture that came later waits for its backward."""
        later = False
        for other in self._captures:
            if later and other.is_waiting:
                return False
            later = later or other is captured
        return True

    def is_in_order(self) -> bool:
        """True if all captures wait for their backwards, so that a new one comes after them in each call."""
        return all(captured.is_waiting for captured in self._captures)


class BackwardMemory:
    """What the captured backwards of one stream share. When one has been launched, its gradients are taken out at once.

    Attributes:
        pool: the memory of their graphs.
    """

    def __init__(self) -> None:
        self.pool = Pool()
        self._buffers: dict[torch.dtype, Tensor] = {}

    def buffers_for(self, tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
        """For each dtype a flat buffer with room for gradients of these tensors, on their device."""
        needed: dict[torch.dtype, int] = {}
        for tensor in tensors:
            needed[tensor.dtype] = needed.get(tensor.dtype, 0) + tensor.numel()
        for dtype, numel in needed.items():
            if dtype not in self._buffers or self._buffers[dtype].numel() < numel:
                self._buffers[dtype] = torch.empty(numel, dtype=dtype, device=tensors[0].device)
        return {dtype: self._buffers[dtype] for dtype in needed}


class Pools:
    """The memory of one slot. Any thread may use it.

    Attributes:
        launching: held while a thread asks whether a forward of the slot may be launched, and launches it.
    """

    def __init__(self) -> None:
        self.launching = threading.Lock()
        self._forward: WeakMembers[ForwardPool] = WeakMembers()
        self._backward: dict[torch.Stream, BackwardMemory] = {}

    def for_forward(self) -> ForwardPool:
        """The pool for a forward with gradients that is captured now. It lives as long as its captures."""
        pool = next((pool for pool in self._forward if pool.is_in_order()), None)
        if pool is None:
            pool = ForwardPool()
            self._forward.add(pool)
        return pool

    def for_backward(self, stream: torch.Stream) -> BackwardMemory:
        """The memory for backwards that are launched on this stream."""
        return self._backward.setdefault(stream, BackwardMemory())


class Pool:
    """Memory that graphs share. torch cannot use a pool whose graphs are all gone, so this is another one then."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: WeakMembers[Any] = WeakMembers()

    def begin(self, graph: Any) -> None:
        """Begins the capture of a graph."""
        if not any(True for _ in self._graphs):
            self._handle = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        self._graphs.add(graph)


class CapturedGraphs:
    """Graphs whose memory comes from ``pool``. They have to be launched in this order.

    Attributes:
        graphs: in the order in which they were captured.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.graphs: list[Any] = []

    @contextmanager
    def runs(self) -> Iterator[None]:
        """What the block launches on the current stream is captured, and does not run."""
        self._begin()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # it says that the capture has failed
                self.graphs[-1].capture_end()
            raise
        self.graphs[-1].capture_end()

    def cut(self) -> None:
        """Inside the block of `runs`: what comes next is in another graph."""
        self.graphs[-1].capture_end()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._pool.begin(graph)
        self.graphs.append(graph)
