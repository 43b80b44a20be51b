"""Replicas share compiled code, and many steps of compiled replicas grow nothing."""

import gc
import threading
import weakref

import psutil
import pytest
import torch
from torch import fx, nn

from compiled_backends import Counting
from each_form import FORMS
from memory import allocated, live_objects

pytestmark = pytest.mark.counts_memory


def build(root: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().to(root)


def step(call, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    call(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        call(x)


def graph_modules() -> int:
    """How many graphs the process holds, whoever made them and whatever for."""
    gc.collect()
    return sum(isinstance(item, fx.GraphModule) for item in gc.get_objects())


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("form", FORMS)
def test_replicas_of_one_device_share_the_code(form):
    held = []
    for count in (2, 8):
        torch._dynamo.reset()
        before, counting = graph_modules(), Counting()
        model = build(torch.device("cpu"))
        call = FORMS[form](model, ["cpu"] * count, compile={"backend": counting})
        call(torch.randn(4 * count, 8, dtype=torch.float64)).sum().backward()
        held.append(graph_modules() - before)
        del call, model
        assert len(counting.compiled) == 1
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("form", FORMS)
def test_dropping_the_form_frees_the_module(form, slots, root):
    model = build(root)
    call = FORMS[form](model, slots, compile={"backend": "eager"})
    call(torch.randn(12, 8, dtype=torch.float64, device=root)).sum().backward()
    alive = [weakref.ref(item) for item in (*model.modules(), *model.parameters())]
    del model, call
    gc.collect()
    assert not any(ref() for ref in alive)


@pytest.mark.long
@pytest.mark.slots(4)
@pytest.mark.parametrize("form", FORMS)
def test_two_hundred_steps_grow_nothing(form, slots, root):
    counting = Counting()
    model = build(root)
    call = FORMS[form](model, slots, compile={"backend": counting})
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 8, dtype=torch.float64, device=root)
    for _ in range(60):
        step(call, optimizer, x)
        step(call, optimizer, x[:11])
    counting.forget_runs()
    optimizer.zero_grad()
    threads, objects = threading.active_count(), live_objects()
    on_devices = allocated() if root.type == "sim" else []
    compiled, memory = len(counting.compiled), psutil.Process().memory_info().rss
    for _ in range(100):
        step(call, optimizer, x)
        step(call, optimizer, x[:11])
    counting.forget_runs()
    optimizer.zero_grad()
    assert len(counting.compiled) == compiled
    assert threading.active_count() <= threads
    assert live_objects() <= objects + 20
    assert root.type != "sim" or allocated(expected=on_devices) == on_devices
    assert psutil.Process().memory_info().rss <= memory + 16 * 2**20
