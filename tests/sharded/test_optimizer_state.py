"""State that one device has saved can be loaded into an optimizer over sharded parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.sharded import ShardedTensor
from dataparallel.testing.steps import assert_equal
from sharded_parameters import OPTIMIZERS, SHAPES, divided, set_gradients, whole_parameters
from sharding import full

NAMES = ["momentum", "amsgrad", "Adagrad", "centered", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD"]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(optimizer.param_groups[0]["params"], step)
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy, as from a file: torch's optimizers would share the counters that they load."""
    return copy.deepcopy(optimizer.state_dict())


def on_one_device(name: str, device: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has made two steps."""
    one = OPTIMIZERS[name](whole_parameters(device), **options)
    train(one, range(2))
    one.load_state_dict(saved(one))  # which casts counters
    return one


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of the parameters, on the CPU."""
    return [full(parameter) for parameter in optimizer.param_groups[0]["params"]]


def over(slots: Any, name: str, one: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
    """An optimizer over sharded parameters that have the values of ``one``."""
    return OPTIMIZERS[name](divided(values(one), slots), **options)


def state(optimizer: torch.optim.Optimizer) -> Any:
    return [
        {name: full(value) if isinstance(value, Tensor) else value for name, value in of_one.items()}
        for of_one in optimizer.state_dict()["state"].values()
    ]


@pytest.mark.slots(4)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_one_device_is_divided_at_the_first_step(
    name: str, foreach: bool, on_owners: Callable[[Callable[[Any], Any]], list[Any]]
) -> None:
    one = on_one_device(name, "cpu", foreach=foreach)  # torch leaves steps where they are, and machines differ
    loaded, before = saved(one), [value.clone() for value in values(one)]
    train(one, range(2, 5))

    def resume(owners: Any) -> None:
        several = OPTIMIZERS[name](divided(before, owners), foreach=foreach)
        several.load_state_dict(copy.deepcopy(loaded))  # machines share no memory
        train(several, range(2, 5))
        assert_equal(values(several), values(one), "parameters", atol=1e-12)
        assert_equal(state(several), state(one), "state", atol=1e-12)

    on_owners(resume)


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "NAdam"])
def test_later_loads_are_divided_at_once(name: str, slots: list) -> None:
    one = on_one_device(name, slots[0])
    several = over(slots, name, one)
    train(several, range(1))
    with torch.no_grad():
        for parameter, value in zip(several.param_groups[0]["params"], values(one), strict=True):
            parameter.copy_(value)
    several.load_state_dict(saved(one))
    alike = [
        value.devices == parameter.devices and value.placement == parameter.placement
        for parameter, of_one in several.state.items()
        for value in of_one.values()
        if isinstance(value, ShardedTensor)
    ]
    assert all(alike)
    assert len(alike) == len(SHAPES) * {"momentum": 1, "amsgrad": 3, "NAdam": 2}[name]
    for optimizer in (several, one):
        train(optimizer, range(2, 4))
    assert_equal(values(several), values(one), "parameters", atol=1e-12)


def test_state_with_other_owners_is_divided_anew(make_slots: Callable[[int], list]) -> None:
    """Sharded state that was saved with another number of devices."""
    one = on_one_device("AdamW", make_slots(4)[0])
    several = over(make_slots(4), "AdamW", one)
    several.load_state_dict(saved(one))
    train(several, range(2, 3))
    fewer = over(make_slots(2), "AdamW", several)
    fewer.load_state_dict(saved(several))
    train(one, range(2, 4))
    train(fewer, range(3, 4))
    assert_equal(values(fewer), values(one), "parameters", atol=1e-12)
