"""Modules for tests of ``parallel_apply`` and ``threads.settings``, and a setting that both use."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.devices import resolve_slots
from dataparallel.threads.gang import Gang
from dataparallel.threads.settings import CallerState


class Call(nn.Module):
    """A module that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Sets the number of torch's intra-op threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Probe(nn.Module):
    """Notes the value that ``read`` returns in each forward, and the thread."""

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
        """The value that each replica has read, in the calling thread, or without ``serial`` in worker threads."""
        self.seen.clear()
        self.threads.clear()
        batch = torch.zeros(len(slots), 2, device=slots[0])
        if serial:
            DataParallel(self, slots, serial=True)(batch)
        else:
            state = CallerState(resolve_slots(slots))
            call = partial(self, batch)
            outcomes = Gang([partial(state.run_in_worker, slot, call) for slot in range(len(slots))], 1).run_tasks()
            for error in [outcome.error for outcome in outcomes if outcome.error is not None]:
                raise error
        assert (threading.get_ident() in self.threads) is serial
        return list(self.seen)
