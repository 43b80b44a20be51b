"""`TreeState` notices each change of a tree's attributes and registries, also one that leaves all values alike."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dataparallel._torch import REGISTRIES
from dataparallel.replicas.tree_state import Contents, TreeState


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.number, self.nothing = 3, None


def rename(net: Net) -> None:
    """The key changes, the values stay."""
    del net.nothing
    net.other = None


CHANGES: dict[str, Callable[[Net], object]] = {
    "an attribute": lambda net: setattr(net, "number", 4),
    "a new attribute": lambda net: setattr(net, "more", 1),
    "an attribute that is gone": lambda net: delattr(net, "number"),
    "a name": rename,
    "the mode": lambda net: net.first.train(not net.first.training),
    "the class": lambda net: setattr(net.first, "__class__", nn.Identity),
    "a parameter": lambda net: setattr(net.first, "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter that is gone": lambda net: net.first.register_parameter("bias", None),
    "a buffer": lambda net: setattr(net.second, "running_mean", torch.ones(2)),
    "a new buffer": lambda net: net.first.register_buffer("mask", torch.ones(2)),
    "a child": lambda net: setattr(net, "first", nn.Linear(2, 2)),
    "a new child": lambda net: net.first.add_module("child", nn.Identity()),
    "a hook": lambda net: net.first.register_forward_hook(lambda *_: None),
    "what is saved": lambda net: net._non_persistent_buffers_set.clear(),
    "what is not saved": lambda net: net.second._non_persistent_buffers_set.add("running_mean"),
    "all attributes": lambda net: setattr(net, "__dict__", {**vars(net), "number": 4}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change):
    net = Net()
    state = TreeState([*net.modules()], REGISTRIES)
    assert state.is_unchanged()
    CHANGES[change](net)
    assert not state.is_unchanged()


def test_values_that_change_in_place_are_not_looked_into():
    net = Net()
    state = TreeState([*net.modules()], REGISTRIES)
    with torch.no_grad():
        net.first.weight.zero_()
    assert state.is_unchanged()


def test_registries_that_do_not_count_may_change():
    net = Net()
    state = TreeState([*net.modules()], ["_modules"])
    net.first.weight = nn.Parameter(torch.ones(2, 2))
    assert state.is_unchanged()


def test_a_key_that_moves_to_the_next_dict_is_noticed():
    """Both dicts together have the keys and values that they had, in the same order."""
    contents = Contents([{"a": 1, "b": 2}, {"c": 3}])
    assert contents.are_in([{"a": 1, "b": 2}, {"c": 3}])
    assert not contents.are_in([{"a": 1}, {"b": 2, "c": 3}])
