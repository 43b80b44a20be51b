"""Memory that another device uses is held until the host knows that it has been used."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

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
    held.forget()


@pytest.mark.devices("cuda")
class TestMemory:
    def tensor(self, root: torch.device) -> tuple[list[torch.Tensor], weakref.ref]:
        memory = [torch.ones(4, device=root)]
        return memory, weakref.ref(memory[0])

    def test_it_is_held_until_its_event_has_passed(self, root: torch.device) -> None:
        events = Event(), Event(), Event()
        (first, one), (second, other) = self.tensor(root), self.tensor(root)
        hold(first, events[0])
        hold(second, events[1])
        del first, second
        events[1].passed = True
        hold([torch.ones(1, device=root)], events[2])
        gc.collect()
        assert one() is not None
        assert other() is None

    def test_where_the_event_has_passed_nothing_is_held(self, root: torch.device) -> None:
        memory, alive = self.tensor(root)
        event = Event()
        event.passed = True
        hold(memory, event)
        del memory
        gc.collect()
        assert alive() is None


@pytest.mark.devices("cpu", "sim")
def test_memory_of_other_devices_is_not_held(root: torch.device) -> None:
    memory = [torch.ones(4, device=root)]
    alive = weakref.ref(memory[0])
    hold(memory, Event())
    hold([], Event())
    del memory
    gc.collect()
    assert alive() is None
