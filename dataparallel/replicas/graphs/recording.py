"""`CapturedGraphs`: graphs that are captured one after the other while one piece of code runs; `Pool`: their memory.

``captured`` and ``pools`` use this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dataparallel.weak_members import WeakMembers


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
