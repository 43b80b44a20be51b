"""A script: six threads call compiled wrappers at once, in many rounds, and some calls of each round are first calls.

``python -c "import compiled_at_once; compiled_at_once.main(KIND, ROUNDS)"``, with ``cpu`` or ``sim``. It prints how
many calls were right and how many graphs have been compiled. A crash of the interpreter ends only this script.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from at_once import in_threads
from compiled_backends import Counting, ran_eagerly
from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.testing.steps import assert_equal, mean_square_loss
from nogpu import simulate

SLOTS = 3
THREADS = 6
CALLS = 3  # of each thread in a round
NEW = 5
"""In every so many rounds models and wrappers are new, so that the first calls of all threads come together."""
FORGET = 20
"""In every so many rounds all that was compiled is forgotten, behind the back of wrappers that are in use."""


class Wrapped:
    """A model, its values on one device, and what to call."""

    def __init__(self, number: int, slots: list) -> None:
        torch.manual_seed(number)
        width = 4 + number % 3  # models of some rounds share their code, others do not
        make = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
        self.source = make.to(slots[0])
        self.parameters = list(self.source.parameters())
        x = torch.randn(4 * len(slots), 4, dtype=torch.float64)
        self.batches = [x.to(slots[0]), x[: 3 * len(slots) - 1].to(slots[0])]
        self.expected = [self._result(self.source, batch) for batch in self.batches]
        self.counting = Counting()
        self.runs_of_a_call = len(slots)
        """How many graphs run."""
        self.times_forgotten = 0
        self.call = self._wrap(number, slots, {"backend": self.counting})

    def _wrap(self, number: int, slots: list, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        if number % 4 == 0:
            return DataParallel(self.source, slots, compile=options)
        if number % 4 == 1:
            return replicate(self.source, devices=slots, compile=options)
        if number % 4 == 2:
            return DataParallel(torch.compile(self.source, **options), slots)
        for child in self.source.children():
            child.compile(**options)
            self.runs_of_a_call += len(slots)
        self.runs_of_a_call -= len(slots)
        return DataParallel(self.source, slots)

    def _result(self, call: Callable[[Tensor], Tensor], batch: Tensor) -> list[Tensor]:
        """The loss and its gradients. None is accumulated, so that threads may share a model."""
        loss = mean_square_loss(call(batch))
        return [loss.detach(), *torch.autograd.grad(loss, self.parameters)]

    def check(self, turn: int) -> None:
        turn %= len(self.batches)
        found = self._result(self.call, self.batches[turn])
        assert_equal(found, self.expected[turn], f"batch {turn}", atol=1e-9)

    def check_graphs(self, calls: int, devices: int) -> None:
        """All that replicas have run since this was asked last was compiled, and no graph was made twice.

        There is one for the first size of chunks and one for any size. If that was made for a chunk that does not begin
        where its batch does, torch makes one more for one that does.
        """
        counting = self.counting
        assert len(counting.forwards) == len(counting.backwards) == self.runs_of_a_call * calls
        counting.forget_runs()
        pieces = self.runs_of_a_call // SLOTS
        most = pieces * (2 * devices + 1) * (1 + self.times_forgotten)
        assert len(counting.compiled) <= most, f"{len(counting.compiled)} graphs, at most {most} are needed"


def main(kind: str, rounds: int) -> None:
    slots: list[Any] = simulate(8)[:SLOTS] if kind == "sim" else ["cpu"] * SLOTS
    torch.set_num_threads(1)
    right: list[int] = []
    wrapped: list[Wrapped] = []
    for number in range(rounds):
        if number % FORGET == 7:
            torch._dynamo.reset()
            for each in wrapped:
                each.times_forgotten += 1
        if number % NEW == 0:
            wrapped = [Wrapped(2 * number // NEW + k, slots) for k in range(2)]

        def work(
            index: int, barrier: threading.Barrier, number: int = number, wrapped: list[Wrapped] = wrapped
        ) -> None:
            barrier.wait()
            for turn in range(CALLS):
                wrapped[index % 2].check(index // 2 + turn)
                right.append(number)

        in_threads(THREADS, work)
        for each in wrapped:
            each.check_graphs(CALLS * THREADS // len(wrapped), len({*slots}))
    assert ran_eagerly() == {}
    print(len(right), torch._dynamo.utils.counters["stats"]["unique_graphs"])
    sys.stdout.flush()
