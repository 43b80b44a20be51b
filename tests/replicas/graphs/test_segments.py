"""Which modules of a replica are captured, by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dataparallel.replicas.graphs.segments import Segments, why_none
from dataparallel.replicas.plan import ModulePlan
from graphed_nets import Block, Net

pytestmark = pytest.mark.devices("cpu")


def names(root: nn.Module) -> list[str]:
    """Of the parts that are captured when gradients are recorded."""
    return [*Segments.of(root).with_gradients]


def test_the_whole_and_its_parts() -> None:
    assert names(Net()) == ["", "blocks.0", "blocks.1"]
    assert [*Segments.of(Net()).without_gradients] == [""]


def test_a_part_that_is_registered_twice_is_one_part() -> None:
    net = Net()
    net.blocks[1] = net.again = net.blocks[0]
    assert names(net) == ["", "blocks.0"]


def test_a_sequential_with_most_parameters_is_taken_apart() -> None:
    assert names(nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(2, 2))) == ["", "0.0", "0.1"]


def test_a_tree_with_hooks_has_none_and_the_reason_names_the_module() -> None:
    net = Net()
    assert why_none(ModulePlan.of(net)) is None
    net.blocks[1].register_forward_hook(lambda *_: None)
    assert why_none(ModulePlan.of(net)) == "blocks.1 has hooks"
    assert why_none(ModulePlan.of(nn.Sequential(nn.GRU(2, 2)))) == ("0 is a GRU, whose class makes its replicas itself")


def test_a_tree_has_none_if_an_attribute_of_a_parameter_holds_tensors() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].weight.scale = torch.ones(2)  # it is sent to new memory at each call
    assert why_none(ModulePlan.of(net)) == "the attribute 'scale' of 0.weight holds tensors"
