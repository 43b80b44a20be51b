"""Many training steps with captured graphs, batches of changing sizes, evaluations and errors: nothing grows."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import wait_for_the_engine
from torch import Tensor

from dataparallel.replicas.graphs.calls import MOST_CAPTURES
from dataparallel.testing.cases import numbers, seeded
from dataparallel.testing.steps import mean_square_loss
from fragile import raises
from graphed_models import FORMS, Row, SmoothLayer, made
from graphed_nets import captured, graphed, reasons
from sharded_steps import Model, moved

pytestmark = pytest.mark.devices("cuda")

MODEL = Model(seeded(lambda: Row(SmoothLayer)), numbers(4))


class Soak:
    """A training. ``chunks``: how many sizes of a replica's share of a batch there are."""

    def __init__(self, form: str, slots: list, chunks: int) -> None:
        self.slots, self.sizes = slots, itertools.cycle(range(1, chunks + 1))
        self.source, self.network = made(MODEL, FORMS[form], slots, graphs=True)
        self.optimizer = torch.optim.AdamW(self.source.parameters(), lr=0.001)

    def step(self, hook: Callable[[Tensor], None] | None = None) -> None:
        """``hook``: of the loss."""
        args, kwargs = moved(MODEL.batch(next(self.sizes) * len(self.slots), 0), self.slots[0])
        self.optimizer.zero_grad()
        loss = mean_square_loss(self.network(*args, **kwargs))
        if hook is not None:
            loss.register_hook(hook)
        loss.backward()
        self.optimizer.step()

    def run(self, steps: int) -> None:
        for number in range(1, steps + 1):
            self.step()
            if number % 10 == 0:
                with pytest.raises(ArithmeticError, match="in a backward hook"):
                    self.step(raises)
            if number % 4 == 0:
                self.network.eval()
                with torch.no_grad():
                    self.network(*moved(MODEL.batch(2 * len(self.slots), 0), self.slots[0])[0])
                self.network.train()

    def what_may_grow(self) -> dict[str, Any]:
        self.optimizer.zero_grad()
        wait_for_the_engine(self.slots)
        gc.collect()
        torch.cuda.synchronize()
        return {
            "allocated": [torch.cuda.memory_allocated(slot) for slot in self.slots],
            "reserved": [torch.cuda.memory_reserved(slot) for slot in self.slots],
            "threads": threading.active_count(),
            "captures": sum(replica.captures for replica in graphed(self.network)),
        }


def soak(form: str, slots: list, chunks: int, steps: int) -> Soak:
    """Runs twice as many steps, the second half without growth."""
    training = Soak(form, slots, chunks)
    training.run(steps)
    before = training.what_may_grow()
    launches = captured(training.network)
    training.run(steps)
    after = training.what_may_grow()
    assert after["captures"] == before["captures"] > 0
    assert after["threads"] <= before["threads"]
    for kind in ("allocated", "reserved"):
        assert all(new <= old for new, old in zip(after[kind], before[kind], strict=True)), (kind, before, after)
    # Some sizes are not captured, and some steps fail.
    assert captured(training.network) - launches > steps * len(slots) / 2
    assert {replica.captures for replica in graphed(training.network)} == {min(chunks, MOST_CAPTURES) + 1}
    return training


@pytest.mark.counts_memory
@pytest.mark.watchdog(600)
@pytest.mark.slots(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("steps", "chunks"), [(30, 3), pytest.param(300, MOST_CAPTURES + 4, marks=pytest.mark.long)])
def test_steps_grow_nothing(steps: int, chunks: int, form: str, slots: list) -> None:
    """Also if there are more sizes than are captured."""
    training = soak(form, slots, chunks=chunks, steps=steps)
    assert all("kinds of arguments" in reason for reason in reasons(training.network))
    assert bool(reasons(training.network)) == (chunks > MOST_CAPTURES)
