"""`Recording`: the graphs that are captured one after the other while one piece of code runs. ``captured`` uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class Recording:
    """Graphs whose memory comes from ``pool``. They have to be launched in this order.

    Attributes:
        graphs: in the order in which they were captured.
    """

    def __init__(self, pool: Any) -> None:
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
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.graphs.append(graph)
