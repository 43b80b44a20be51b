"""Outputs of a replica that share a graph get their gradients together, in all forms, and other outputs one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.autograd.node import groups_that_share
from dataparallel.testing.cases import seeded
from each_form import graphing_forms, replicating_forms, whole
from sharded_steps import on_device

WIDTH = 6


class Interleaved(nn.Module):
    """Two outputs and three uses of one tensor. That of the first output is between those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.watch: Callable[[str], Any] = lambda name: lambda grad: None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        c, a, b = torch.cos(h * 1.7), h * 3.3, torch.sin(h * 0.3)
        first, second = a * 3, b * c
        for name, tensor in {"first": first, "second": second}.items():
            if tensor.requires_grad:
                tensor.register_hook(self.watch(name))
        return first, second


class Towers(nn.Module):
    """Two outputs that share nothing but the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@graphing_forms
def test_the_backward_of_a_slot_begins_when_all_gradients_are_there(form: Any, slots: list, root: torch.device) -> None:
    """Otherwise the second output's would be there long before the first one's."""
    seen: list[str] = []
    model = on_device(seeded(Interleaved), root)
    model.watch = lambda name: lambda grad: seen.append(name)
    first, second = form(model, slots)(torch.randn(7, WIDTH, dtype=torch.float64, device=root))
    late = first * 1
    late.grad_fn._set_sequence_nr(0)  # after all other nodes that are ready in this thread
    late.register_hook(lambda grad: seen.append("late"))
    (late.sum() + second.sum()).backward()
    assert seen[0] == "late"
    assert sorted(seen[1:]) == ["first"] * 3 + ["second"] * 3


@pytest.mark.slots(4)
@pytest.mark.devices("sim", "cuda")
@graphing_forms
def test_gradients_have_the_same_bits_in_every_run(form: Any, slots: list, root: torch.device) -> None:
    """In whatever order they come to the slots."""
    model = form(on_device(seeded(Interleaved), root).float(), slots)
    x = torch.randn(16, WIDTH, device=root)
    found = set()
    for _ in range(30):
        model.zero_grad()
        sum(output.square().mean() for output in model(x)).backward()
        found.add(tuple(whole(next(model.parameters()).grad).flatten().tolist()))
    assert len(found) == 1


@graphing_forms
@pytest.mark.parametrize("first", [0, 1])
def test_outputs_that_share_nothing_have_backwards_of_their_own(
    first: int, form: Any, slots: list, root: torch.device
) -> None:
    model = form(on_device(seeded(Towers), root), slots)
    outputs = model(torch.randn(7, WIDTH, dtype=torch.float64, device=root))
    outputs[first].sum().backward()
    assert any(parameter.grad is None for parameter in model.parameters())
    outputs[1 - first].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Doubles(torch.autograd.Function):
    """As users write it: it would get zeros for ``None``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Heads(nn.Module):
    """Two heads on one trunk. A function that is written in Python is behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.a(h), Doubles.apply(self.b(h)), h.sum(1)


@replicating_forms
def test_a_head_that_no_loss_needs_has_no_gradient(form: Any, slots: list, root: torch.device) -> None:
    model = form(on_device(seeded(Heads), root), slots)
    first, _, third = model(torch.randn(7, WIDTH, dtype=torch.float64, device=root))
    (first.sum() + third.sum()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == [
        name for name, _ in model.named_parameters() if name.removeprefix("module.").startswith("b.")
    ]


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("are_ordered", [True, False])
def test_what_is_shared_is_found_with_and_without_the_order_of_nodes(are_ordered: bool, monkeypatch: Any) -> None:
    """Numbers are positions of outputs. ``x + 1`` has saved nothing; functions of users are shared by all or none."""
    if not are_ordered:
        monkeypatch.setattr(_torch, "sequence_nr", lambda node: 0)
    x = torch.ones(3, requires_grad=True)
    a, b, h = x.exp(), x.sin(), x + 1
    for tensors, expected in (
        ([a.sum(), b.sum(), b * 2, (a + 2) * 2], [[0, 3], [1, 2]]),
        ([h.exp(), h.sin()], []),
        ([a * 2, Doubles.apply(a * 3), a.sum()], [[0, 2]]),
        ([a * 2, Doubles.apply(a)], []),
        ([(y := Doubles.apply(a)).sin(), y.cos()], [[0, 1]]),
    ):
        assert groups_that_share([tensor.grad_fn for tensor in tensors]) == expected
