"""A module that notes what its replicas see, for the tests of ``thread_state``."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel


class Probe(nn.Module):
    """Notes what it reads in each forward, and the thread."""

    def __init__(self, read: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.read = read
        self.seen: list[Any] = []
        self.threads: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.read())
        self.threads.add(threading.get_ident())
        return x

    def run(self, slots: list, serial: bool) -> list[Any]:
        """What each replica has read."""
        self.seen.clear()
        self.threads.clear()
        DataParallel(self, slots, serial=serial)(torch.zeros(len(slots), 2, device=slots[0]))
        assert (threading.get_ident() in self.threads) is serial
        return list(self.seen)
