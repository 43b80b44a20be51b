"""The copy of a module that a capture runs: what it shares with the module, and what it has for itself."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dataparallel import _torch
from dataparallel.replicas.compiled.calls import CALL, CompiledCall
from dataparallel.replicas.compiled.functions import by_call_impl, functions_for
from dataparallel.replicas.graphs.copied import copy_for_capture
from dataparallel.replicas.graphs.pieces import Pieces, capturing

pytestmark = pytest.mark.devices("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.twice, self.none, self.scale = self.first, None, [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.twice(self.first(x)))) * self.scale[0]


def pieces_of(module: nn.Module) -> Pieces:
    return Pieces(module, [p for p in module.parameters() if p.requires_grad], lambda: None, lambda: True)


def test_computes_the_same_with_leaves_of_its_own() -> None:
    module, x = Net(), torch.randn(4, 3)
    module.last.bias.requires_grad_(False)
    pieces = pieces_of(module)
    copy = copy_for_capture(module, pieces)
    assert copy.first is copy.twice
    torch.testing.assert_close(copy.eval()(x), module.eval()(x), rtol=0, atol=0)
    copy(x).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    for name, leaf in copy.named_parameters():
        parameter = module.get_parameter(name)
        assert type(leaf) is type(parameter)
        assert leaf.data_ptr() == parameter.data_ptr()
        assert (leaf is parameter) is (name == "last.bias")
        if leaf is not parameter:
            assert pieces.parameter_of[id(leaf)][0] is parameter
            assert leaf.grad is not None


def test_shares_buffers_and_attributes_and_leaves_the_module_as_it_is() -> None:
    module = Net()
    before = [(vars(child).copy(), child._parameters.copy()) for child in module.modules()]
    copy = copy_for_capture(module, pieces_of(module))
    copy(torch.randn(4, 3))
    assert module.norm.num_batches_tracked == 1
    assert copy.norm._buffers is module.norm._buffers
    assert copy.scale is module.scale
    assert [(vars(child), child._parameters) for child in module.modules()] == before


def test_is_gone_with_its_last_reference() -> None:
    module = Net()
    copy = copy_for_capture(module, pieces_of(module))
    copy(torch.randn(4, 3)).sum()
    gone = weakref.ref(copy.last)
    del copy
    assert gone() is None


def test_a_part_begins_a_piece_also_if_it_is_compiled() -> None:
    module: Any = nn.Sequential(Net(), Net())
    begun = []

    class Noted(Pieces):
        def part_begins(self, part: nn.Module, *arguments: Any) -> None:
            begun.append(part)

    class Around:
        compiled: Any = None

    for part in module:
        vars(part)[CALL] = Around()
    functions = functions_for(
        module[1], by_call_impl, _torch.compiler_context(torch.compile(Net(), backend="eager")), []
    )
    vars(module[1])[CALL].compiled = CompiledCall(functions, module[1])
    pieces = Noted(module, [], lambda: None, lambda: True)
    copy = copy_for_capture(module, pieces)
    assert type(copy[1]._parameters) is dict  # the compiler looks at types
    assert vars(copy[1])[CALL].compiled.module is copy[1]
    assert type(copy[0]._parameters) is not dict
    vars(copy[1])[CALL].compiled = None  # to run it here without the compiler
    with capturing(pieces):
        copy(torch.randn(4, 3))
    assert begun == [*copy]
