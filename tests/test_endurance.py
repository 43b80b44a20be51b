"""After many steps and with many callers nothing has grown, nothing hangs, everything is freed."""

import gc
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from freed_later import freed_later
from memory import allocated, live_objects
from selection import others_long

pytestmark = pytest.mark.counts_memory


def mlp(root) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().to(root)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


def doubled(self, x):
    return 2 * self.linear(x) + self.family[0].shift


class Family(nn.Module):
    """A child that refers back to its parent and has a method bound to the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.child = Child()
        self.child.family = [self]
        self.child.forward = types.MethodType(doubled, self.child)

    def forward(self, x):
        return self.child(x)


def training_step(wrapped, optimizer, x) -> None:
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    optimizer.step()


def units(model, slots, **options) -> nn.Module:
    """The model, fully sharded, with a unit for each linear layer."""
    for layer in (model[0], model[2]):
        fully_shard(layer, devices=slots, **options)
    return fully_shard(model, devices=slots, **options)


forms = pytest.mark.parametrize(
    "form",
    [
        pytest.param(DataParallel, id="DataParallel"),
        pytest.param(lambda model, slots: replicate(model, devices=slots), id="replicate"),
        pytest.param(units, id="fully_shard"),
        pytest.param(partial(units, reshard_after_forward=False), id="fully_shard, units stay full"),
    ],
)


@pytest.mark.long
@forms
@pytest.mark.slots(4)
def test_a_thousand_training_steps_grow_nothing(form, slots, root):
    model = form(mlp(root), slots)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 8, dtype=torch.float64, device=root)
    for _ in range(100):
        training_step(model, optimizer, x)
    threads, objects, memory = threading.active_count(), live_objects(), psutil.Process().memory_info().rss
    held = allocated(slots)
    for _ in range(1000):
        training_step(model, optimizer, x)
    assert threading.active_count() <= threads
    assert live_objects() <= objects + 20
    assert psutil.Process().memory_info().rss <= memory + 8 * 2**20
    assert allocated(slots, held) == held


@pytest.mark.long
def test_a_hundred_modules_one_after_the_other_leave_nothing(slots, root):
    def use() -> None:
        module = replicate(mlp(root), devices=slots)
        for _ in range(2):
            module(torch.ones(6, 8, dtype=torch.float64, device=root)).sum().backward()

    for _ in range(5):
        use()
    held, objects = allocated(slots), live_objects()
    for _ in range(100):
        use()
    assert allocated(slots, held) == held
    assert live_objects() <= objects + 20


@forms
def test_forwards_without_backward_leave_nothing(form, slots, root):
    model = form(mlp(root), slots)
    x = torch.randn(6, 8, dtype=torch.float64, device=root).requires_grad_()
    for _ in range(10):
        model(x)
    objects = live_objects()
    for _ in range(20):
        model(x)
    assert live_objects() < objects + 20


def test_dropping_the_wrapper_frees_the_module(slots, root):
    model = mlp(root)
    wrapped = DataParallel(model, slots)
    wrapped(torch.randn(6, 8, dtype=torch.float64, device=root)).sum().backward()
    alive = [weakref.ref(module) for module in model.modules()] + [weakref.ref(p) for p in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model, wrapped
        assert not any(ref() for ref in alive)
    finally:
        gc.enable()


@freed_later
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(mlp, id="mlp"),
        pytest.param(lambda root: Family().double().to(root), id="family"),
    ],
)
def test_a_step_leaves_the_collector_no_more_than_one_device_does(build, slots, root):
    model = build(root)
    x = torch.randn(6, 8, dtype=torch.float64, device=root)

    def garbage_of_a_step(call) -> int:
        for _ in range(2):
            gc.collect()
            call(x).square().mean().backward()
            model.zero_grad()
        return gc.collect()

    gc.disable()
    try:
        assert garbage_of_a_step(DataParallel(model, slots)) <= garbage_of_a_step(model)
    finally:
        gc.enable()


def test_circles_between_attributes_need_no_collector(slots, root):
    model = Family().double().to(root)
    wrapped = DataParallel(model, slots)
    x = torch.randn(6, 8, dtype=torch.float64, device=root)

    def steps(count) -> None:
        for _ in range(count):
            wrapped(x).square().mean().backward()
            model.zero_grad()
            with torch.no_grad():
                wrapped(x)

    steps(40)  # by then what is kept for measuring calls is there
    gc.collect()
    gc.disable()
    try:
        steps(5)  # tuples that these leave in the place of others are not counted before the next collection
        objects = len(gc.get_objects())
        steps(50)
        assert len(gc.get_objects()) <= objects + 20
    finally:
        gc.enable()


class Nested(nn.Module):
    """A wrapper inside a wrapped module's forward."""

    def __init__(self, slots, root) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8).double().to(root)
        self.inner = DataParallel(mlp(root), slots)

    def forward(self, x):
        return self.inner(self.first(x))


CALLS = 30


def call_often(wrapped, expected, x, recording) -> None:
    for _ in range(CALLS):
        with torch.set_grad_enabled(recording):
            output = wrapped(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        if recording:
            torch.autograd.grad(output.sum(), list(wrapped.module.parameters()))


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize(
    "arrangement", others_long(["one wrapper", "two wrappers", "a wrapper in a wrapper"], ["one wrapper"])
)
def test_six_threads_call_at_once(arrangement, recording, slots, root):
    if arrangement == "a wrapper in a wrapper":
        if len({*slots}) > 1:
            pytest.skip("a nested wrapper's first slot is the outer's, which only one replica is on")
        models = [Nested(slots, root)]
    else:
        models = [mlp(root) for _ in range(2 if arrangement == "two wrappers" else 1)]
    wrappers = [DataParallel(model, slots) for model in models]
    x = torch.randn(7, 8, dtype=torch.float64, device=root)
    expected = [model(x).detach() for model in models]
    with ThreadPoolExecutor(6) as callers:
        done = [
            callers.submit(call_often, wrappers[k % len(wrappers)], expected[k % len(wrappers)], x, recording)
            for k in range(6)
        ]
        for future in done:
            future.result()
