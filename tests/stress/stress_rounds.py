"""What a thread of the stress test does again and again: rounds, each of which checks its own results.

A round takes the `World` that all threads share, and random numbers of its own. It calls shared models, as the guide
promises that any thread may, or it makes models that no other thread knows. It raises if a result is wrong.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from stress_models import (
    CLOSE,
    FORMS,
    Broken,
    SharedModel,
    applied,
    by_chunks,
    made,
    same_bits,
    same_parameters,
    samples,
)
from torch import Tensor, nn

from at_once import in_threads
from dataparallel import DataParallel, peers, prefetch
from dataparallel.composable import replicate
from each_form import whole

Random = random.Random


@dataclass
class World:
    """What all threads share.

    Attributes:
        slots: of all models.
        models: which threads call at once; `renew` replaces them while calls of the old ones may still run.
        bits: of trainings that have ended, by what was trained: the same training has the same bits.
    """

    slots: Sequence[torch.device]
    models: list[SharedModel] = field(default_factory=list)
    bits: dict[Any, list[Tensor]] = field(default_factory=dict)

    def renew(self, seed: int) -> None:
        kinds = [*((form, False, False) for form in FORMS), (FORMS[0], True, False), (FORMS[0], False, True)]
        self.models = [SharedModel(form, seed + i, self.slots, *more) for i, (form, *more) in enumerate(kinds)]

    @property
    def root(self) -> torch.device:
        return self.slots[0]


Round = Callable[[World, Random], None]
ROUNDS: dict[str, tuple[Round, int]] = {}
"""Each round by its name, with how often it comes beside others."""


def round_of_stress(weight: int) -> Callable[[Round], Round]:
    def add(function: Round) -> Round:
        ROUNDS[function.__name__] = function, weight
        return function

    return add


# ---- shared models ---------------------------------------------------------------------------------------------------


@round_of_stress(30)
def call_shared(world: World, choose: Random) -> None:
    """Calls of one model from several threads at once, with and without gradients."""
    shared = choose.choice(world.models)
    for _ in range(choose.randint(1, 4)):
        shared.call(record=shared.gradients is not None and choose.random() < 0.5, inference=choose.random() < 0.3)


@round_of_stress(10)
def serve_frozen(world: World, choose: Random) -> None:
    """Blocks of several threads overlap, so that the model is frozen for all or for none."""
    shared = next(each for each in world.models if each.is_served)
    with shared.model.options.frozen():
        for _ in range(choose.randint(1, 5)):
            shared.call(record=False, inference=choose.random() < 0.5)


@round_of_stress(5)
def prefetched(world: World, choose: Random) -> None:
    """A loader's batches are sent ahead, beside those of other threads."""
    shared = choose.choice(world.models)
    batches = [shared.x.cpu().clone() for _ in range(choose.randint(1, 4))]
    with torch.no_grad():
        for batch in prefetch(batches, shared.model, depth=choose.randint(1, 2)):
            same_bits(f"prefetched output of {shared.name}", shared.model(batch), shared.output)


# ---- models that one thread trains -----------------------------------------------------------------------------------

STEPS = 5


class Training:
    """A training of ``form``, whose changes follow from ``number``. `run` gives the parameters at its end."""

    def __init__(self, form: str, number: int, slots: Sequence[torch.device]) -> None:
        self.form, self.number, self.slots = form, number, slots
        self.key = form, number
        self.names: list[str] = []
        self._choose = random.Random(f"training {number}")

    def run(self) -> list[Tensor]:
        root, number = self.slots[0], self.number
        ours, theirs = (made(number, root, family=number % 4 == 3 and self.form == "DataParallel") for _ in range(2))
        model = applied(self.form, ours, self.slots)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, theirs)]
        for step in range(STEPS):
            x = samples(100 * number + step, 2 * len(self.slots) + number % 3, root)
            self._step(model, x, optimizers[0])
            self._step(partial(by_chunks, theirs, slots=len(self.slots)), x, optimizers[1])
            same_parameters(ours, theirs, f"{self.form}, training {number}, step {step}")
            change = self._choose.choice(["nothing", "scale", "mode", "hook", "gradients", "values", "child"])
            for net in (ours, theirs):
                self._change(change, net, step)
        self.names = [name for name, _ in ours.named_parameters()]
        return [whole(parameter).detach().clone() for parameter in ours.parameters()]

    @staticmethod
    def _step(call: Callable[[Tensor], Tensor], x: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()

    def _change(self, change: str, net: Any, step: int) -> None:
        last = net.last[0] if isinstance(net.last, nn.Sequential) else net.last
        if change == "scale":
            net.scale = 1.0 + 0.1 * step
        elif change == "mode":
            net.train(not net.training)
        elif change == "hook":
            last.register_forward_hook(lambda module, args, output: output * 1.5)
        elif change == "gradients":
            last.bias.requires_grad_(not last.bias.requires_grad)
        elif change == "values" and self.form != "fully_shard":
            net.first.weight.data.mul_(0.9)
        elif change == "child" and self.form != "fully_shard":
            net.last = nn.Sequential(last, nn.Tanh())


@round_of_stress(20)
def train(world: World, choose: Random) -> None:
    """Steps of a model, changed between steps, as on one device. The same training has the same bits each time."""
    training = Training(choose.choice(FORMS), choose.randint(0, 7), world.slots)
    found = training.run()
    known = world.bits.setdefault(training.key, found)
    for name, ours, theirs in zip(training.names, found, known, strict=True):
        same_bits(f"{name} after {training.key}", ours, theirs)


@round_of_stress(10)
def fail(world: World, choose: Random) -> None:
    """A replica fails in forward or backward; then the model works as before."""
    form, where, root = choose.choice(FORMS), choose.choice(["forward", "backward"]), world.root
    model = applied(form, made(choose.randint(0, 9), root).eval(), world.slots)
    x = samples(choose.randint(0, 9), 3 * len(world.slots), root)
    with torch.no_grad():
        expected = model(x).clone()
    bad = x.clone()
    bad[3 * choose.randrange(len(world.slots))] = 1e6 if where == "forward" else -1e6
    with pytest.raises(Broken, match=where):
        model(bad).square().sum().backward()
    model.zero_grad()
    with torch.no_grad():
        same_bits(f"output of {form} after a failure in {where}", model(x), expected)


@round_of_stress(6)
def first_calls_together(world: World, choose: Random) -> None:
    """The first calls of a model come from several threads at once, so that all of them find nothing made yet."""
    form, count = choose.choice(FORMS), choose.randint(2, 3)
    net, alone = (made(choose.randint(0, 9), world.root).eval() for _ in range(2))
    alone.load_state_dict(net.state_dict())
    model, x = applied(form, net, world.slots), samples(1, 3 * len(world.slots), world.root)
    with torch.no_grad():
        expected = by_chunks(alone, x, len(world.slots))

    def call(index: int, barrier: threading.Barrier) -> None:
        barrier.wait()
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(x), expected, rtol=0, atol=CLOSE)

    in_threads(count, call)
    model(x).square().sum().backward()
    alone.zero_grad()
    by_chunks(alone, x, len(world.slots)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=0, atol=1e-7)


# ---- collectives -----------------------------------------------------------------------------------------------------


class Contrast(nn.Module):
    """Each replica compares its samples with those of all, in a checkpoint if asked to."""

    def __init__(self, root: torch.device, checkpointed: bool) -> None:
        super().__init__()
        self.net, self.checkpointed = made(3, root), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return peers.checkpoint(self.compared, x) if self.checkpointed else self.compared(x)

    def compared(self, x: Tensor) -> Tensor:
        y = self.net(x)
        mean = peers.all_reduce(y.sum(0)) / peers.all_reduce(torch.ones((), dtype=y.dtype, device=y.device) * len(y))
        peers.barrier()
        return (y - mean) @ peers.all_gather(y).T


@round_of_stress(12)
def replicas_meet(world: World, choose: Random) -> None:
    """Collectives in forward, as on one device with the whole batch."""
    form = choose.choice(["DataParallel", "replicate"])
    net, alone = (Contrast(world.root, choose.random() < 0.3) for _ in range(2))
    model = DataParallel(net, world.slots) if form == "DataParallel" else replicate(net, devices=world.slots)
    x = samples(choose.randint(0, 9), 3 * len(world.slots) + choose.randint(0, 2), world.root)
    for _ in range(2):
        output, expected = model(x), alone(x)
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected, rtol=0, atol=CLOSE)
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-7)


@round_of_stress(5)
def replicas_wait_in_vain(world: World, choose: Random) -> None:
    """One replica fails while the others wait for it. Its error is raised, and the next call works."""
    net = Contrast(world.root, False)
    model, x = DataParallel(net, world.slots), samples(0, 2 * len(world.slots), world.root)
    bad = x.clone()
    bad[2 * choose.randrange(len(world.slots))] = 1e6
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(Broken):
            model(bad)
        same_bits("output after a failure beside collectives", model(x), expected)
