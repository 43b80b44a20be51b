"""After many steps and with many callers nothing has grown, nothing hangs, everything is freed."""

import threading
import weakref
from functools import partial

import psutil
import pytest
import torch
from torch import nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate
from memory import allocated, live_objects

pytestmark = pytest.mark.counts_memory


def mlp(root) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().to(root)


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


@pytest.mark.devices("sim")
def test_every_byte_that_was_kept_for_replaced_parameters_is_freed(slots, root):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(root)
    wrapped, x, former = DataParallel(model, slots), torch.randn(16, 4, device=root), []
    start = 0
    for step in range(100):
        if step % 10 == 9:
            bias = model[step // 10 % 3].bias
            model[step // 10 % 3].bias = nn.Parameter(0.9 * bias.detach())
            former.append(weakref.ref(bias))
            del bias
        wrapped(x).square().mean().backward()
        wrapped.zero_grad()
        with torch.no_grad():
            wrapped(x)
        start = start or allocated(slots)
    assert allocated(slots, start) == start
    assert not any(parameter() for parameter in former)
