"""In this folder operators that would gather raise: its tests ask what works on parts. Some tests let them gather."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.sharded import ShardedTensor, distribute_tensor
from fake_machines import on_fake_machines, owners_of


@pytest.fixture(autouse=True)
def only_parts(gathers_are_errors: None) -> None:
    """For all tests."""


@pytest.fixture
def whole() -> Tensor:
    return torch.arange(21.0).reshape(7, 3)


@pytest.fixture
def sharded(whole: Tensor, slots: list) -> ShardedTensor:
    return distribute_tensor(whole, slots)


@pytest.fixture(params=[1, 2], ids=["one machine", "two machines"])
def on_owners(request: pytest.FixtureRequest, slots: list) -> Callable[[Callable[[Any], Any]], list[Any]]:
    """Calls a function with the owners that each machine has, on one machine or on two; returns the results."""

    def call(function: Callable[[Any], Any]) -> list[Any]:
        if request.param == 1:
            return [function(tuple(slots))]
        return on_fake_machines(lambda over: function(owners_of(slots, over)), request.param)

    return call
