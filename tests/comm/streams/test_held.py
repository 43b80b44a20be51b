"""Memory that another device uses is held until the host knows that it has been used."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from clocked import check_clocks
from dataparallel import comm
from dataparallel.comm import kernels
from dataparallel.comm.streams import held
from dataparallel.comm.streams.held import hold


class Event:
    """In place of an event: it has passed when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def has_passed(self) -> bool:
        return self.passed


@pytest.fixture(autouse=True)
def nothing_else() -> None:
    held._held.clear()


@pytest.mark.devices("cuda")
class TestMemory:
    NBYTES = 4 << 20

    def tensor(self, root: torch.device) -> list[Tensor]:
        return [torch.ones(self.NBYTES // 4, device=root)]

    def test_it_is_held_until_its_event_has_passed(self, root: torch.device) -> None:
        events, before = [Event() for _ in range(3)], torch.accelerator.memory_allocated(root)
        for event in events:
            hold(self.tensor(root), event)
        assert torch.accelerator.memory_allocated(root) == before + 3 * self.NBYTES
        events[0].passed = events[1].passed = True
        hold(self.tensor(root), Event())
        assert torch.accelerator.memory_allocated(root) == before + 2 * self.NBYTES

    def test_what_has_passed_goes_with_a_model(self, form: Callable, slots: list, root: torch.device) -> None:
        model = form(torch.nn.Linear(4, 4).to(root), slots)
        gc.collect()
        event, before = Event(), torch.accelerator.memory_allocated(root)
        hold(self.tensor(root), event)
        event.passed = True
        del model
        gc.collect()
        assert torch.accelerator.memory_allocated(root) < before

    def test_a_model_may_go_while_memory_is_held(self, form: Callable, slots: list, root: torch.device) -> None:
        """Python collects garbage at any time, in the middle of `hold` too."""
        model = form(torch.nn.Linear(4, 4).to(root), slots)
        gc.collect()

        class Collects(Event):
            def has_passed(self) -> bool:
                nonlocal model
                model = None
                gc.collect()
                return super().has_passed()

        hold(self.tensor(root), Collects())
        assert model is None

    def test_no_graph_is_held_with_it(self, root: torch.device) -> None:
        x = torch.ones(4, device=root, requires_grad=True)
        y = x.exp()
        alive = weakref.ref(y)
        hold([y], Event())
        del y
        assert alive() is None

    def test_a_forked_child_frees_nothing(self, root: torch.device) -> None:
        """To free it the child would ask for locks that another thread may have held at the fork, and hang."""
        memory = self.tensor(root)
        storage = StorageWeakRef(memory[0].untyped_storage())
        hold(memory, Event())
        del memory
        child = os.fork()
        if child == 0:
            os._exit(storage.expired())
        assert os.waitpid(child, 0)[1] == 0
        held._held.clear()
        assert storage.expired()


LARGE = 3 << 20
"""Bytes above which torch's cache gets memory for a tensor alone, and gives it back when it is emptied."""


def like(x: list[Tensor], part: int = 1) -> list[Tensor]:
    return [torch.empty(LARGE // part, device=tensor.device) for tensor in x]


TRAVELS: dict[str, Callable[[list[Tensor]], object]] = {
    "broadcast": lambda x: comm.broadcast(x[0], [tensor.device for tensor in x]),
    "broadcast of a view": lambda x: comm.broadcast(x[0][::2], [tensor.device for tensor in x]),
    "broadcast into": lambda x: comm.broadcast(x[0], out=like(x[1:])),
    "broadcast coalesced": lambda x: comm.broadcast_coalesced(x[:1], [tensor.device for tensor in x]),
    "scatter": lambda x: comm.scatter(x[0], [tensor.device for tensor in x]),
    "scatter into": lambda x: comm.scatter(x[0], out=like(x, 3)),
    "gather": lambda x: comm.gather(x),
    "gather of views": lambda x: comm.gather([tensor[::2] for tensor in x]),
    "gather into": lambda x: comm.gather(x, out=torch.empty(3 * LARGE, device=x[0].device)),
    "reduce_add": lambda x: comm.reduce_add(x),
    "reduce_add of views": lambda x: comm.reduce_add([tensor[::2] for tensor in x]),
    "reduce_add_coalesced": lambda x: comm.reduce_add_coalesced([[tensor] for tensor in x], x[2].device),
    "reduce_add on a third device": lambda x: comm.reduce_add(x[:2], x[2].device),
    "add_flat": lambda x: comm.add_flat([tensor.clone() for tensor in x], x[0].device),
    "reduce_scatter": lambda x: comm.reduce_scatter([tensor.view(3, -1) for tensor in x], like(x, 3)),
    "reduce_scatter of two": lambda x: comm.reduce_scatter([tensor.view(3, -1) for tensor in x[:2]], like(x, 3)),
}
"""Each drops what it returns, and memory of its own. Its arguments stay."""


@pytest.mark.devices("stand-in")
@pytest.mark.parametrize("way", ["star", "chain", "cupy"], indirect=True)
@pytest.mark.parametrize("travel", TRAVELS)
def test_a_cache_may_be_emptied_when_what_has_travelled_is_dropped(
    travel: str, way: str, slots: list[torch.device]
) -> None:
    """A device that gives memory back does not wait for a peer that still writes or reads it: the clocks say so."""
    if way == "cupy" and (reason := kernels.why_not(slots)) is not None:
        pytest.skip(reason)
    for order in (slots, slots[::-1]):  # devices give memory back in the order of their numbers
        x = [torch.ones(LARGE, device=slot) for slot in order]
        for slot in slots:
            torch.cuda.synchronize(slot)
        torch.cuda.empty_cache()
        TRAVELS[travel](x)
        torch.cuda.empty_cache()
        check_clocks()
