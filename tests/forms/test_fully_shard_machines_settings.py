"""`fully_shard` over machines: settings of units, policies, and gradients that wait or that only one machine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from dataparallel.comm.streams.current import streams_joined
from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy
from dataparallel.testing.steps import assert_equal
from machine_ranks import on_machines
from sharded_machines import EACH_SPREAD, SPREADS, over, ranks_of, slots_of
from sharded_steps import gradients


class Net(nn.Module):
    """Two units, and branches that a machine may use or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.last = nn.Linear(7, 3)
        self.double()

    uses = (True, False)

    def units(self) -> list[Any]:
        return [self.first, [*self.branches]]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for branch, used in zip(self.branches, Net.uses, strict=True):
            if used:
                x = x + branch(x)
        return self.last(x)


def made(devices: list[Any], way: str | None = None, **options: Any) -> Any:
    """The model over machines, or on the first device."""
    net = Net().to(devices[0])
    return net if way is None else over(way, net, devices, **options)


def batch(rank: int, seed: int, device: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    return torch.randn(3, 5, dtype=torch.float64, generator=generator).to(device)


def backward(net: Any, rank: int, seed: int, device: Any, scale: float = 1) -> None:
    (net(batch(rank, seed, device)).double().square().sum() * scale).backward()


def by_one(
    devices: list[Any], seeds: list[int], uses: Callable[[int], tuple[bool, bool]] = lambda _: (True, False)
) -> Any:
    """The model on one device with the gradients of all machines' backwards, averaged over machines."""
    net, ranks = made(devices), distributed.get_world_size()
    for seed in seeds:
        for rank in range(ranks):
            Net.uses = uses(rank)
            backward(net, rank, seed, devices[0], 1 / ranks)
    Net.uses = True, False
    return net


def run(function: Callable[..., Any], way: str) -> None:
    on_machines(function, way, ranks=ranks_of(way), slots=slots_of(way), group_timeout=20)


def assert_as_by_one(net: Any, one: Any, atol: float = 1e-9) -> None:
    assert_equal(gradients(net), gradients(one), "gradients", atol=atol)


# ---- parameters that are not used everywhere ------------------------------------------------------------------------


def uses_on(rank: int) -> tuple[bool, bool]:
    """The first branch on even machines."""
    return rank % 2 == 0, False


def unused_on_one(rank: int, devices: list[Any], way: str) -> None:
    net = made(devices, way)
    for seed in (1, 2):
        Net.uses = uses_on(rank)
        backward(net, rank, seed, devices[0])
    assert_as_by_one(net, by_one(devices, [1, 2], uses_on))
    found = gradients(net)
    assert found["branches.0.weight"] is not None
    assert found["branches.1.weight"] is None


# ---- gradients that wait --------------------------------------------------------------------------------------------


def waits_for_all_reduce(rank: int, devices: list[Any], way: str) -> None:
    net = made(devices, way)
    net.set_requires_all_reduce(False)
    for seed in (1, 2):
        backward(net, rank, seed, devices[0])
        assert all(grad is None or not grad.any() for grad in gradients(net).values())
    net.set_requires_all_reduce(True)
    backward(net, rank, 3, devices[0])
    assert_as_by_one(net, by_one(devices, [1, 2, 3]))
    # What waits is dropped with the gradients.
    net.set_requires_all_reduce(False)
    backward(net, rank, 4, devices[0])
    net.zero_grad()
    net.set_requires_all_reduce(True)
    backward(net, rank, 5, devices[0])
    assert_as_by_one(net, by_one(devices, [5]))
    # The last pass uses no branch, and gradients of the first one wait for it.
    net.zero_grad()
    twin = by_one(devices, [1])
    net.set_requires_all_reduce(False)
    backward(net, rank, 1, devices[0])
    net.set_requires_all_reduce(True)
    Net.uses = False, False
    backward(net, rank, 2, devices[0])
    ranks = distributed.get_world_size()
    for other in range(ranks):
        backward(twin, other, 2, devices[0], 1 / ranks)
    assert_as_by_one(net, twin)


def waits_on_slots_and_for_all_reduce(rank: int, devices: list[Any], way: str) -> None:
    net = made(devices, way)
    with net.no_sync():
        backward(net, rank, 1, devices[0])
    net.set_requires_all_reduce(False)
    backward(net, rank, 2, devices[0])
    with net.no_sync():
        backward(net, rank, 3, devices[0])
    net.set_requires_all_reduce(True)
    backward(net, rank, 4, devices[0])
    backward(net, rank, 5, devices[0])
    assert_as_by_one(net, by_one(devices, [1, 2, 3, 4, 5]))


# ---- settings -------------------------------------------------------------------------------------------------------


def settings(rank: int, devices: list[Any], way: str) -> None:
    net = made(devices, way)
    parts: list[torch.device] = []

    def doubled(part: Tensor) -> None:
        parts.append(part.device)
        part.mul_(2)

    net.set_all_reduce_hook(doubled)
    net.first.set_gradient_divide_factor(4)
    backward(net, rank, 1, devices[0])
    assert parts == devices
    expected = gradients(by_one(devices, [1]))
    for name in expected:
        if expected[name] is not None:
            expected[name] *= 0.25 if name.startswith("first") else 2 if name.startswith("last") else 1
    assert_equal(gradients(net), expected, "gradients", atol=1e-9)


def penalties(rank: int, devices: list[Any], way: str) -> None:
    """Each machine has the same penalty on the same parameters, and averages only what it has summed of its samples."""
    net, one = made(devices, way), by_one(devices, [1])
    found = {name: 0 if grad is None else grad for name, grad in gradients(one).items()}
    expected = {n: 4 * (found[n] + 2 * p.detach().cpu()).clamp(-0.5, 0.5) for n, p in one.named_parameters()}
    parameters = [*net.parameters()]
    for parameter in parameters:
        parameter.register_hook(lambda gradient: 4 * gradient.clamp(-0.5, 0.5))
    penalty = sum((p * p).sum() for p in parameters)
    (net(batch(rank, 1, devices[0])).square().sum() + penalty).backward()
    assert_equal(gradients(net), expected, "gradients", atol=1e-9)
    net.zero_grad()
    net.set_requires_all_reduce(False)
    (0.25 * sum((p * p).sum() for p in parameters)).backward()
    net.set_requires_all_reduce(True)
    (net(batch(rank, 1, devices[0])).square().sum() + 0.75 * sum((p * p).sum() for p in parameters)).backward()
    if way != "1-D":  # without an all-reduce nothing waits for it
        assert_equal(gradients(net), expected, "gradients that have waited", atol=1e-9)


def backward_on_other_streams(rank: int, devices: list[Any], way: str) -> None:
    """The clocks see it if the optimizer, on those streams, does not wait for all sums."""
    net = made(devices, way)
    optimizer = torch.optim.AdamW(net.parameters())
    others = {device: torch.Stream(device) for device in devices}
    for seed in range(2):
        loss = net(batch(rank, seed, devices[0])).square().sum()
        with streams_joined(others):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def arrives_on_the_host(rank: int, devices: list[Any], way: str) -> None:
    """What the host has waited for, any stream may read."""
    net, x = made(devices, way, offload_policy=CPUOffloadPolicy()), batch(rank, 0, devices[0]).requires_grad_()
    net(x).square().sum().backward()
    with torch.Stream(devices[0]):
        x.grad * 1
    torch.accelerator.synchronize(devices[0])


@pytest.mark.devices("sim")
@EACH_SPREAD
@pytest.mark.parametrize("function", [backward_on_other_streams, arrives_on_the_host])
def test_streams(function, way):
    run(function, way)


# ---- policies -------------------------------------------------------------------------------------------------------


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
POLICIES: list[tuple[dict[str, Any], float]] = [
    ({"offload_policy": OFFLOAD}, 1e-9),
    ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}, 1e-6),
    ({"mp_policy": HALF, "offload_policy": OFFLOAD}, 2e-2),
]


def policies(rank: int, devices: list[Any], way: str) -> None:
    for options, atol in POLICIES:
        net = made(devices, way, **options)
        for seed in (1, 2):
            backward(net, rank, seed, devices[0], 0.01)
        one = by_one(devices, [1, 2])
        for parameter in one.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.01
        assert_as_by_one(net, one, atol)


IN_EACH_SPREAD = [waits_on_slots_and_for_all_reduce, settings, penalties, policies]
CASES = [(function, way) for function in IN_EACH_SPREAD for way in SPREADS]
CASES += [(waits_for_all_reduce, way) for way in SPREADS if way != "1-D"]
CASES += [(unused_on_one, way) for way in ("hybrid", "2-D, one of each")]


@pytest.mark.parametrize(("function", "way"), CASES)
def test_gradients_are_those_of_one_device(function, way):
    run(function, way)
