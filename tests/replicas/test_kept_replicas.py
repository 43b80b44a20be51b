"""Calls without a graph, one after the other: nothing of the last call is in the next.

Tests of tensors are in test_tensor_stores, of what somebody else holds in test_kept_replicas_held, of `frozen` in
test_kept_replicas_frozen, of the changes of a tree that are noticed in test_snapshot.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nets import DOES, Net, on_one_device


def constant_layer(net: Net) -> nn.Linear:
    layer = nn.Linear(4, 4).to(net.shift)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer


MUTATIONS: dict[str, Callable[[Net], Any]] = {
    "copy_": lambda net: net.linear.weight.detach().copy_(net.linear.weight * 2),
    "data.fill_": lambda net: net.linear.weight.data.fill_(0.3),
    "data =": lambda net: setattr(net.linear.weight, "data", net.linear.weight.data * 0.5),
    "data = other strides": lambda net: setattr(net.linear.weight, "data", net.linear.weight.data.t()),
    "load_state_dict": lambda net: net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()}),
    "load_state_dict, assign": lambda net: net.load_state_dict(
        {k: v * 0.5 for k, v in net.state_dict().items()}, assign=True
    ),
    "a swapped parameter": lambda net: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.detach() + 1)),
    "no bias": lambda net: setattr(net.linear, "bias", None),
    "a tie": lambda net: setattr(net.linear, "weight", net.inner[0].weight),
    "a child replaced": lambda net: net.inner.__setitem__(1, nn.ReLU()) if len(net.inner) > 1 else None,
    "a child added": lambda net: net.inner.append(constant_layer(net)),
    "a child removed": lambda net: net.inner.__delitem__(-1) if len(net.inner) > 1 else None,
    "an attribute": lambda net: setattr(net, "scale", net.scale + 1),
    "an attribute more": lambda net: setattr(net, f"more{len(vars(net))}", 1),
    "another mode": lambda net: net.train(not net.training),
    "a hook": lambda net: setattr(net, "handle", net.linear.register_forward_hook(lambda m, args, y: y * 2)),
    "no hook": lambda net: vars(net).pop("handle").remove() if "handle" in vars(net) else None,
    "a pre-hook": lambda net: setattr(net, "handle", net.linear.register_forward_pre_hook(lambda m, a: (a[0] + 1,))),
    "another forward": lambda net: setattr(net.linear, "forward", net.inner[0].forward),
    "requires_grad": lambda net: net.linear.requires_grad_(not net.linear.weight.requires_grad),
    "a buffer in place": lambda net: net.shift.add_(1),
    "another buffer": lambda net: setattr(net, "shift", net.shift * 2),
    "a buffer more": lambda net: net.linear.register_buffer("late", torch.ones_like(net.shift)),
    "another dtype and back": lambda net: net.float().double(),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_change_is_seen_at_the_next_forward(mutate, net, wrapped, call, x) -> None:
    call()
    call()
    for _ in range(2):
        mutate(net)
        for _ in range(2):
            torch.testing.assert_close(call(), on_one_device(net, x), rtol=0, atol=1e-9)


def test_calls_from_several_threads(net, wrapped, root, without_graph) -> None:
    batches = [torch.randn(n, 4, dtype=torch.float64).to(root) for n in (3, 5, 7, 9)]
    expected = [on_one_device(net, batch) for batch in batches]
    failed: list[BaseException] = []

    def run(n: int) -> None:
        try:
            for _ in range(25):
                with without_graph():
                    torch.testing.assert_close(wrapped(batches[n]), expected[n], rtol=0, atol=1e-9)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.devices("sim", "cuda")
def test_other_devices(wrapped, call) -> None:
    seen = []
    DOES.append(lambda replica: seen.append(replica.shift.device.index))
    for ids in ([0, 1, 2], [0, 2, 1], [0, 1, 1, 2], [0, 0, 3]):
        wrapped.device_ids = ids
        seen.clear()
        call()
        assert sorted(seen) == sorted(ids)
