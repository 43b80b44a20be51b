"""Replicas that wait get a permit each, and no call makes the host wait to find out how many are better."""

import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clocked import timeline
from dataparallel import DataParallel
from dataparallel.comm.streams.current import Event
from dataparallel.composable import fully_shard, replicate
from dataparallel.threads import permits

pytestmark = pytest.mark.usefixtures("two_cores")

TIMEOUT = 20.0


class Sleeps(nn.Module):
    """Notes how many replicas are inside at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[int] = []
        self.most: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inside.append(0)
        self.most.append(len(self.inside))
        time.sleep(0.02)
        self.inside.pop()
        return x + 1


@pytest.mark.slots(8)
@pytest.mark.devices("sim", "stand-in")
def test_a_model_that_sleeps_gets_a_permit_for_each_slot(slots: list, root: torch.device) -> None:
    module, x, numbers = Sleeps().eval(), torch.zeros(16, 2, device=root), []
    model = DataParallel(module, slots)
    for _ in range(20):
        with torch.no_grad():
            assert torch.equal(model(x), x + 1)
        numbers.append(max(module.most))
        module.most.clear()
    assert numbers[0] == numbers[-1] == 8
    assert min(numbers) == 2, "the other number was tried"


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("wrap", [DataParallel, replicate, fully_shard])
def test_no_step_after_the_third_makes_the_host_wait_whatever_the_sizes(
    slots: list, root: torch.device, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and evaluations of sizes that come once, that come again, and of two inputs of different lengths."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(self.first(x).tanh()).mean() + y.mean()

    model = Net().to(root)
    model = DataParallel(model, slots) if wrap is DataParallel else wrap(model, devices=slots)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(rows: int, length: int, other: int, is_training: bool = True) -> None:
        x, y = torch.ones(rows, length, 2, device=root), torch.ones(rows, other, device=root)
        model.train(is_training)
        with nullcontext() if is_training else torch.no_grad():
            loss = model(x, y).sum()
        if is_training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    for _ in range(3):
        step(6, 1, 1)
    # A query is no wait; but where it finds work done, the recording takes it for one.
    monkeypatch.setattr(Event, "has_passed", lambda event: False)
    waits: list[Any] = []
    synchronize = Event.synchronize
    monkeypatch.setattr(Event, "synchronize", lambda event: (waits.append(event), synchronize(event)))
    of_many_lengths = [(3 * (1 + k % 20), 1 + 7 * k % 33, 1 + 5 * k % 17, k % 4 != 3) for k in range(30)]
    for sizes in [*[(6, 1, 1, True)] * 10, *of_many_lengths]:
        with timeline() as recorded:
            step(*sizes)
            for slot in slots:
                torch.ones(1, device=slot)  # what this thread has waited for before is noted at its next launch
        waits += [launch for launch in recorded.recording.launches if launch.host_waits]
    assert waits == []


class Waiting(nn.Module):
    """Its replicas wait for each other."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait(TIMEOUT)
        return x


@pytest.mark.slots(8)
def test_replicas_that_wait_for_each_other_do_not_hang_and_run_together_from_then_on(
    slots: list, root: torch.device
) -> None:
    model = DataParallel(Waiting(threading.Barrier(8)), slots).eval()
    stalls = []
    with torch.no_grad():
        for size in (8, 16):
            for _ in range(30):
                start = time.monotonic()
                model(torch.zeros(size, 2, device=root))
                stalls.append(time.monotonic() - start > 0.9 * permits.STALL_TIMEOUT)
    assert sum(stalls) == (2 if root.type == "cpu" else 1), "on the CPU a first call may just be slow"
