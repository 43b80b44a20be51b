"""State that one device has saved can be loaded into an optimizer over sharded parameters."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from dataparallel.sharded.distribute import counters
from dataparallel.testing.steps import assert_equal
from sharding import full, sharded

# Uneven, with empty parts, of one row, 0-dim, and divided along the second dimension.
PLACEMENTS = {(5, 4): Shard(0), (2, 3): Shard(0), (1,): Shard(0), (): Shard(0), (4, 7): Shard(1), (6, 2): Replicate()}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.1, amsgrad=True, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=0.1, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=0.1, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.1, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=0.1, t0=2, **k),
}


def parameters(device: Any) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(device)) for shape in PLACEMENTS]


def divided(plain: Sequence[Tensor], slots: list) -> list[nn.Parameter]:
    return [nn.Parameter(sharded(p, slots, PLACEMENTS[tuple(p.shape)], requires_grad=False)) for p in plain]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 + step)
        for parameter in optimizer.param_groups[0]["params"]:
            gradient = torch.randn(parameter.shape, dtype=torch.float64)
            if isinstance(parameter, ShardedTensor):
                parameter.grad = sharded(gradient, parameter.devices, parameter.placement)
            else:
                parameter.grad = gradient.to(parameter.device)
        optimizer.step()


def pair(name: str, slots: list, **options: Any) -> list[torch.optim.Optimizer]:
    """One over sharded parameters, and one over their twins on one device, which has made two steps."""
    several, one = (OPTIMIZERS[name](p, **options) for p in (divided(parameters("cpu"), slots), parameters(slots[0])))
    train(one, range(2))
    one.load_state_dict(saved(one))  # which casts counters
    give_values(several, one)
    return [several, one]


def give_values(several: torch.optim.Optimizer, one: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter, value in zip(several.param_groups[0]["params"], values(one), strict=True):
            parameter.copy_(value)


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy, as from a file: torch's optimizers would share the counters that they load."""
    return copy.deepcopy(optimizer.state_dict())


def state(optimizer: torch.optim.Optimizer) -> Any:
    return [
        {name: full(value) if isinstance(value, Tensor) else value for name, value in of_one.items()}
        for of_one in optimizer.state_dict()["state"].values()
    ]


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of the parameters, on the CPU."""
    return [full(parameter) for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_one_device_is_divided_at_the_first_step(name: str, foreach: bool, slots: list) -> None:
    several, one = pair(name, slots, foreach=foreach)
    several.load_state_dict(saved(one))
    for optimizer in (several, one):
        train(optimizer, range(2, 5))
    assert_equal(values(several), values(one), "parameters", atol=1e-12)
    assert_equal(state(several), state(one), "state", atol=1e-12)


@pytest.mark.parametrize("name", ["momentum", "AdamW", "NAdam"])
def test_later_loads_are_divided_at_once(name: str, slots: list) -> None:
    several, one = pair(name, slots)
    train(several, range(1))
    give_values(several, one)
    several.load_state_dict(saved(one))
    alike = [
        value.devices == parameter.devices and value.placement == parameter.placement
        for parameter, of_one in several.state.items()
        for value in of_one.values()
        if isinstance(value, ShardedTensor)
    ]
    assert all(alike)
    assert len(alike) == len(PLACEMENTS) * (1 if name == "momentum" else 2 + (name == "AdamW"))
    for optimizer in (several, one):
        train(optimizer, range(2, 4))
    assert_equal(values(several), values(one), "parameters", atol=1e-12)


def test_a_copy_of_an_optimizer_divides_too(slots: list) -> None:
    """A copy has no hooks of the original's."""
    several, one = pair("AdamW", slots)
    train(several, range(1))
    copied = copy.deepcopy(several)
    copied.load_state_dict(saved(one))
    give_values(copied, one)
    for optimizer in (copied, one):
        train(optimizer, range(2, 4))
    assert_equal(values(copied), values(one), "parameters", atol=1e-12)


def test_state_with_other_owners_is_divided_anew(make_slots: Callable[[int], list]) -> None:
    """Sharded state that was saved with another number of devices."""
    several, one = pair("AdamW", make_slots(4))
    several.load_state_dict(saved(one))
    train(several, range(2, 3))
    fewer = OPTIMIZERS["AdamW"](divided([full(p) for p in several.param_groups[0]["params"]], make_slots(2)))
    fewer.load_state_dict(saved(several))
    train(one, range(2, 4))
    train(fewer, range(3, 4))
    assert_equal(values(fewer), values(one), "parameters", atol=1e-12)


def test_counters_stay_plain(slots: list) -> None:
    """Also those of a 0-dim parameter, which have its shape."""
    several, one = pair("ASGD", slots)
    several.load_state_dict(saved(one))
    train(several, range(2, 3))
    for of_one in several.state.values():
        assert {name for name, value in of_one.items() if isinstance(value, ShardedTensor)} == {"ax"}


def test_counters_of_other_optimizers_are_known_by_other_parameters() -> None:
    """A value is a counter if it is 0-dim beside a parameter that is not."""
    scalar, vector = torch.ones(()), torch.ones(3)
    of_scalar = {"age": torch.ones(()), "mean": torch.ones(())}
    of_vector = {"age": torch.ones(()), "mean": torch.ones(3)}
    found = counters([(scalar, of_scalar), (vector, of_vector)])
    assert "age" in found
    assert "mean" not in found


def test_a_group_that_is_added_later_is_divided_too(slots: list) -> None:
    sharded_ones = divided(parameters(slots[0]), slots)
    several, one = OPTIMIZERS["momentum"](parameters(slots[0])), OPTIMIZERS["momentum"](parameters(slots[0]))
    train(several, range(1))
    several.add_param_group({"params": sharded_ones})
    for parameter, twin in zip(sharded_ones, one.param_groups[0]["params"], strict=True):
        several.state[parameter]["momentum_buffer"] = torch.ones_like(twin)
        one.state[twin]["momentum_buffer"] = torch.ones_like(twin)
    torch.manual_seed(7)
    for parameter, twin in zip(sharded_ones, one.param_groups[0]["params"], strict=True):
        twin.grad = torch.randn(twin.shape, dtype=torch.float64).to(slots[0])
        parameter.grad = sharded(twin.grad, slots, parameter.placement)
    for optimizer in (several, one):
        optimizer.step()
    assert_equal([full(p) for p in sharded_ones], values(one), "parameters", atol=1e-12)
