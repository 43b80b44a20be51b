"""Ignored parts of a tree are shared by all replicas, and every change of them is seen at the next call."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept import assert_same, gradients
from loops import SMALL
from torch import Tensor, nn

from affine import Affine
from dataparallel.composable import replicate
from dataparallel.replicas import kept_replicas as kept_replicas
from dataparallel.testing.cases import seeded
from nets import DOES, forget

pytestmark = [
    # Ignored parameters are used directly: the limits tell of this.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


class Shared(nn.Linear):
    """A layer that all slots can use at the same time; it has a child and a list."""

    scale = 1.0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.inside = nn.Sequential(nn.Tanh())
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight.to(x.device), self.bias.to(x.device))
        return self.inside(y) * self.scale


class WithIgnored(Affine):
    """`shared`, `blocks[1]` and the parameter `shift` are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Shared(3, 3), Shared(3, 3), nn.Tanh())
        self.shared = Shared(3, 3)
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(super().forward(x))
        y = self.shared(y) + self.shift.to(y.device)
        for does in DOES:
            does(self)
        return y


@pytest.fixture(autouse=True)
def nothing_asked():
    yield
    forget()


@pytest.fixture
def twin(root) -> WithIgnored:
    return seeded(WithIgnored)().to(root)


@pytest.fixture
def net(root, slots) -> WithIgnored:
    made = seeded(WithIgnored)().to(root)
    ignored = {"ignored_modules": [made.shared, made.blocks[1]], "ignored_params": [made.shift]}
    return replicate(made, devices=slots, **ignored, **SMALL)


def step(module: nn.Module, x: Tensor) -> Tensor:
    module.zero_grad()
    output = module(x)
    output.square().sum().backward()
    return output


def another(like: nn.Module, cls: type[nn.Module] = Shared) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return cls(3, 3).to(next(like.parameters()))


def parameter(like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, like.numel()).reshape(like.shape).to(like))


CHANGES: dict[str, Callable[[WithIgnored], object]] = {
    "a replaced ignored module": lambda net: setattr(net, "shared", another(net)),
    "a replaced ignored module further down": lambda net: net.blocks.__setitem__(1, another(net)),
    "an ignored module's parameter, tied": lambda net: setattr(net.shared, "weight", net.blocks[0].weight),
    "an ignored module's parameter": lambda net: setattr(net.blocks[1], "bias", parameter(net.blocks[1].bias)),
    "an ignored module's parameter in the tree": lambda net: setattr(net.blocks[0], "weight", net.shared.weight),
    "an ignored parameter": lambda net: setattr(net, "shift", parameter(net.shift)),
    "an ignored parameter in another place": lambda net: setattr(net.blocks[0], "bias", net.shift),
    "values of ignored parameters": lambda net: [p.data.mul_(0.5) for p in (net.shared.weight, net.shift)],
    "frozen ignored parameters": lambda net: [p.requires_grad_(False) for p in (net.shared.weight, net.shift)],
    "a child added inside an ignored module": lambda net: net.shared.inside.append(another(net)),
    "an ignored child removed": lambda net: net.blocks.__delitem__(1),
    "an ignored module in one more place": lambda net: net.blocks.append(net.shared),
    "an attribute of an ignored module": lambda net: setattr(net.shared, "scale", 3.0),
    "a hook of an ignored module": lambda net: net.shared.register_forward_hook(lambda module, args, y: y * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_at_the_next_call(net, twin, batch, change) -> None:
    for _ in range(3):
        step(net, batch)
    for module in (net, twin):
        change(module)
    for _ in range(3):
        torch.testing.assert_close(step(net, batch), step(twin, batch), rtol=0, atol=1e-9)
        assert_same(gradients(net), gradients(twin))
        with torch.no_grad():
            torch.testing.assert_close(net(batch), twin(batch), rtol=0, atol=1e-9)


def moved(replica: Any) -> None:
    replica.shared.notes.append(replica.blocks)
    replica.blocks = nn.Identity()


LEAVES: dict[str, Callable[[Any], Any]] = {
    "another module for the ignored one": lambda replica: setattr(replica, "shared", nn.Identity()),
    "a child that has left for the ignored one": moved,
    "a parameter in the ignored one": lambda replica: replica.shared.notes.append(replica.linear.weight),
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_what_a_forward_leaves_on_its_replica_is_dropped(net, twin, batch, leave) -> None:
    """No later call uses a child that has left its parent, or a tensor that an ignored module was given."""
    used: list[int] = []
    for _ in range(3):
        step(net, batch)
        DOES.append(leave)
        step(net, batch)
        DOES[:] = [lambda replica: used.extend(map(id, replica.modules()))]
        output = step(net, batch)
        DOES.clear()
        assert {*map(id, net.shared.notes)}.isdisjoint(used)
        torch.testing.assert_close(output, step(twin, batch), rtol=0, atol=1e-9)
        assert_same(gradients(net), gradients(twin))
        used.clear()
        net.shared.notes.clear()


class TestTheyAreHandedOverAsTheyAre:
    @pytest.fixture
    def net(self, root):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(root)

    def seen_by_replicas(self, net, batch):
        """The modules and parameters that replicas have, one row for each replica."""
        rows = []

        def forward(self, x):
            rows.append(([*self.modules()], [*self.parameters()]))
            return x

        net.forward = types.MethodType(forward, net)
        net(batch)
        assert len(rows) == 3
        return rows

    @pytest.mark.parametrize("record", [True, False])
    def test_wherever_they_are_and_nothing_else_is(self, net, slots, batch, record):
        net[1] = nn.Linear(4, 4, device="meta")
        net[0].weight = net[1].weight
        net[0].bias = nn.Parameter(torch.empty(4, device="meta"))
        net.append(nn.Linear(4, 4, device=batch.device))
        replicate(net, devices=slots, ignored_modules=[net[1]], ignored_params=[net[0].bias])
        with torch.set_grad_enabled(record):
            rows = self.seen_by_replicas(net, batch)
        for modules, parameters in rows:
            assert [found is own for found, own in zip(modules[1:], net, strict=True)] == [False, True, False]
            are_same = [found is own for found, own in zip(parameters, net.parameters(), strict=True)]
            assert are_same == [True, True, True, False, False]
