"""Machines that are threads of this process, for tests of what is sharded over machines without process groups.

One of them runs at a time: the turn passes on where one waits for the others, so a test runs in one order. Each has
states of the random generators of its own. Machines that call different collectives get an error, and so does one that
waits for a machine that has ended: nothing hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dataparallel.sharded.placements import Owners

T = TypeVar("T")

SECONDS = 120.0


class OutOfStep(AssertionError):
    """Machines have called different things, or one has ended while another waits for it."""


class FakeMachines:
    """What the machines share: whose turn it is, and what they have sent in the present round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []
        self._changed = threading.Condition()
        self._turn = 0
        self._sent: dict[int, tuple[str, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._ended: set[int] = set()

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """What all machines have sent, once all have called this with the same ``what``."""
        with self._changed:
            self._sent[rank] = (what, value)
            self._settle()
            self._pass_on(rank)
            self._wait(rank)
            answer = self._answers.pop(rank)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def start(self, rank: int) -> None:
        """Waits for this machine's first turn."""
        with self._changed:
            self._wait(rank)

    def end(self, rank: int) -> None:
        """This machine takes part in nothing any more."""
        with self._changed:
            self._ended.add(rank)
            self._settle()
            self._pass_on(rank)

    def _settle(self) -> None:
        """Answers machines that wait, if their round is complete or cannot be."""
        if len(self._sent) + len(self._ended) < self.size:
            return
        called = {rank: what for rank, (what, _) in self._sent.items()}
        if len(called) == self.size and len({*called.values()}) == 1:
            self.calls.append(called[0])
            values = [self._sent[rank][1] for rank in range(self.size)]
            self._answers |= {rank: values for rank in called}
            self._sent = {}
            return
        for rank in called:
            self._answers[rank] = OutOfStep(f"machines have called {called}; {sorted(self._ended)} have ended")
        self._sent = {}

    def _pass_on(self, rank: int) -> None:
        """The next machine's turn that can run."""
        following = [(rank + i) % self.size for i in range(1, self.size + 1)]
        free = [other for other in following if other not in self._sent and other not in self._ended]
        if free:
            self._turn = free[0]
        self._changed.notify_all()

    def _wait(self, rank: int) -> None:
        states = _random_states()
        mine = self._changed.wait_for(lambda: self._turn == rank and rank not in self._sent, SECONDS)
        assert mine, f"machine {rank} has waited for {SECONDS} s"
        _set_random_states(states)


class FakeOver:
    """One of the machines, as ``machines.lanes.Machines`` are."""

    def __init__(self, machines: FakeMachines, rank: int) -> None:
        self.machines, self.rank, self.size = machines, rank, machines.size

    def all_gather(self, tensor: Tensor) -> Tensor:
        assert not tensor.is_meta
        assert not tensor.requires_grad
        name = f"all_gather {tuple(tensor.shape)} {tensor.dtype}"
        values = self.machines.exchange(self.rank, name, tensor.detach().clone())
        return torch.stack([value.to(tensor.device) for value in values])

    def describe(self) -> str:
        return f"machine {self.rank} of {self.size}"

    def objects(self, value: T) -> list[T]:
        """What each machine has passed."""
        return self.machines.exchange(self.rank, "objects", value)


def on_fake_machines(function: Callable[[FakeOver], T], machines: int = 2) -> list[T]:
    """Calls ``function(over)`` on each machine. Returns the results, or raises the first machine's own error."""
    shared = FakeMachines(machines)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    states = _random_states()

    def run(rank: int) -> None:
        try:
            shared.start(rank)
            results[rank] = function(FakeOver(shared, rank))
        except BaseException as error:
            errors[rank] = error
        finally:
            shared.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"machine {rank}") for rank in range(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _set_random_states(states)
    for error in sorted(errors.values(), key=lambda error: isinstance(error, OutOfStep)):
        raise error
    return [results[rank] for rank in range(machines)]


def _random_states() -> list[Tensor]:
    accelerator = torch.accelerator.current_accelerator()
    found = [torch.get_rng_state()]
    if accelerator is not None and torch.get_device_module(accelerator).is_available():
        found += torch.get_device_module(accelerator).get_rng_state_all()
    return found


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state_all(states[1:])


def owners_of(slots: Sequence[Any], over: FakeOver) -> Owners:
    """This machine's share of the slots of all machines, as owners."""
    each = len(slots) // over.size
    return Owners(map(torch.device, slots[over.rank * each : (over.rank + 1) * each]), over)
