"""Ranks, slots, hooks and backward are delayed at random: nothing hangs, and the bits are those without delays."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.futures import Future

from machine_ranks import on_machines
from machine_steps import assert_equal_values, happens, train


class Delays:
    """Sleeps at random: often not at all, often less than a step, seldom longer than one. Any thread may call it."""

    def __init__(self, seed: int) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.count = 0

    def __call__(self, place: str = "") -> None:
        with self._lock:
            kind, seconds = self._random.random(), self._random.random()
            self.count += 1
        if kind > 0.5:
            time.sleep(seconds * (0.03 if kind > 0.97 else 0.003))


def hook_parameters(model: Any, delay: Callable[[], object]) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: delay())


def hook_sums(model: Any, delay: Callable[[], object]) -> None:
    """A communication hook that is late itself, and whose futures are late."""

    def mean(state: object, bucket: Any) -> Future[Tensor]:
        delay()
        flat = bucket.buffer().div_(distributed.get_world_size())

        def late(done: Future[Any]) -> Tensor:
            delay()
            return done.value()[0]

        return distributed.all_reduce(flat, async_op=True).get_future().then(late)

    model.register_comm_hook(None, mean)


def hook_parts(model: Any, delay: Callable[[], object]) -> None:
    model.set_all_reduce_hook(lambda total: delay())


HOOKS = {"parameters": hook_parameters, "sums": hook_sums, "parts": hook_parts}


def train_twice(
    rank: int, devices: list[torch.device], form: str, hooks: str, steps: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Without delays, and with."""
    happens.now = lambda place: None
    undisturbed = train(form, rank, devices, steps, before=lambda model: HOOKS[hooks](model, lambda: None))
    delays = Delays(rank)
    happens.now = delays
    found = train(form, rank, devices, steps, before=lambda model: HOOKS[hooks](model, delays))
    assert delays.count > 10 * steps
    return undisturbed, found


@pytest.mark.watchdog(300)
@pytest.mark.parametrize(("steps", "ranks"), [(20, 2), (200, 3)])
@pytest.mark.parametrize(
    ("form", "hooks"), [("replicate", "parameters"), ("replicate", "sums"), ("hybrid", "parts"), ("1-D", "parts")]
)
def test_bits_are_those_without_delays(form: str, hooks: str, steps: int, ranks: int) -> None:
    found = on_machines(train_twice, form, hooks, steps, ranks=ranks, timeout=250)
    for rank, (undisturbed, delayed) in enumerate(found):
        assert_equal_values(delayed, undisturbed)
        assert_equal_values(delayed, found[0][1], buffers=rank == 0)
