"""What orders the streams of replicas at a collective. Clocks find a race."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clocked import check_clocks
from dataparallel import peers
from peer_calls import on_a_side_stream, parallel, samples

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: peers.all_reduce(x.sin()),
    "mean": lambda x: peers.all_reduce(x.sin(), "mean"),
    "max": lambda x: peers.all_reduce(x.sin(), "max"),
    "prod": lambda x: peers.all_reduce(x.sin(), "prod"),
    "all_gather": lambda x: peers.all_gather(x.sin()),
    "all_gather along 1": lambda x: peers.all_gather(x.sin(), -1),
    "broadcast": lambda x: peers.broadcast(x.sin(), peers.count() - 1) * x,
    "reduce_scatter": lambda x: peers.reduce_scatter(x.sin()),
}


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.parametrize("on_one_device", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_side_streams_in_replicas(name: str, on_one_device: bool, make_slots: Callable[[int], list]) -> None:
    """The clocks would find a race, in forward and in backward."""

    def function(x: Tensor) -> Tensor:
        made = FUNCTIONS[name](x * 2)
        x.mul_(3)  # the exchange has read what this replica changes now
        return made.cos()

    slots = [make_slots(1)[0]] * 3 if on_one_device else make_slots(3)
    x = samples(6, 2).to(slots[0]).requires_grad_()
    for _ in range(2):
        result = parallel(on_a_side_stream(function), slots)(x)
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        gradient.square().sum().backward()
    torch.accelerator.synchronize()


@pytest.mark.devices("sim", "stand-in")
def test_a_result_may_be_freed_on_the_stream_of_its_replica(make_slots: Callable[[int], list]) -> None:
    """It is memory of the first replica's stream, which must not use it again before the other one has read it."""
    freed = threading.Event()

    def function(x: Tensor) -> Tensor:
        found = peers.all_reduce(x.repeat(500, 1))
        if peers.index() == 1:
            result = found.sum(0, keepdim=True) * 1
            del found
            freed.set()
            return result
        assert freed.wait(60)
        again = [torch.full((500, 2), -1.0, dtype=x.dtype, device=x.device) for _ in range(8)]
        return again[0][:1] + found[:1]

    slots = [make_slots(1)[0]] * 2
    x = samples(2, 2).to(slots[0])
    with torch.no_grad():
        result = parallel(on_a_side_stream(function), slots, workers=2).eval()(x)
    check_clocks()
    torch.testing.assert_close(result[1], x.sum(0) * 500)
