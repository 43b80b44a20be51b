"""Copies of tensors that stay have the source's values at every call, also if ``forward`` gives them other memory."""

from collections.abc import Callable

import pytest
import torch
from kept import Branched, gradients, loss, numbers
from loops import SMALL
from torch import Tensor, nn

from dataparallel.composable import replicate
from dataparallel.testing.cases import seeded


def data(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def move(tensor: Tensor) -> None:
        tensor.data = make(tensor.data)

    return move


MOVES: dict[str, Callable[[Tensor], object]] = {
    "set_": lambda tensor: tensor.set_(tensor.detach().clone()),
    ".data =": data(Tensor.clone),
    ".data = a neighbour": data(lambda old: old.new_zeros(3, *old.shape)[1]),
    ".data = transposed": data(Tensor.t),
    ".data = another dtype": data(Tensor.float),
    ".data = nothing": data(lambda old: old.new_empty(0)),
}


class Moved(nn.Module):
    """Uses a parameter, then gives it other memory, and notes each replica's values before."""

    def __init__(self, name: str, move: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.fixed = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.name, self.move = name, move
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append({name: tensor.detach().cpu().clone() for name, tensor in self.named_parameters()})
        y = self.fixed(torch.tanh(self.linear(x)))
        with torch.no_grad():
            self.move(self.get_parameter(self.name))
        return y


@pytest.mark.parametrize("name", ["linear.weight", "fixed.weight", "unused.weight"])
@pytest.mark.parametrize("how", MOVES)
def test_every_replica_has_the_sources_values_at_each_call(
    slots: list, root: torch.device, how: str, name: str
) -> None:
    moved = seeded(Moved, name, MOVES[how])().to(root)
    wrapped = replicate(moved, devices=slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for context in (torch.enable_grad, torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode) * 2:
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.add_(1)
        expected = {name: parameter.detach().cpu().clone() for name, parameter in moved.named_parameters()}
        with context():
            output = wrapped(x)
        assert len(moved.seen) == len(slots)
        for seen in moved.seen:
            torch.testing.assert_close(seen, expected, rtol=0, atol=0, check_stride=True)
        moved.seen.clear()
        if output.requires_grad and how == ".data =":  # on one device too others break the graph
            output.sum().backward()


@pytest.mark.parametrize("of", ["parameters", "input"])
def test_a_graph_whose_values_are_gone_raises_as_on_one_device(
    net: Branched, slots: list, root: torch.device, of: str
) -> None:
    """The second forward writes other values to the memory that the first one's backward would read."""
    x = numbers(root, 2 * len(slots) + 1)
    wrapped = replicate(net, devices=slots, **SMALL)
    for _ in range(2):
        loss(wrapped(x)).backward()
        net.zero_grad()
    leaf = x.clone().requires_grad_()
    value = loss(wrapped(leaf))
    with torch.no_grad():
        net.second.weight.mul_(2)
    wrapped(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, [leaf] if of == "input" else list(net.parameters()))
    assert gradients(net) == [None] * len(gradients(net))


class Sparse(nn.Module):
    """Has a weight in COO layout, and the same layout in a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).relu().to_sparse())
        self.fixed = nn.Parameter(torch.randn(4, 4).relu().to_sparse(), requires_grad=False)
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.seen: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.weight, self.fixed, self.graph]
        self.seen.append([tensor.detach().cpu().to_dense() for tensor in tensors])
        y = torch.sparse.mm(self.graph, torch.sparse.mm(self.fixed, x.t()))
        return torch.sparse.mm(self.weight, y).t()


def with_another_pattern(tensor: Tensor, step: int) -> None:
    other = torch.zeros(4, 4, dtype=tensor.dtype)
    other[0, step] = other[2, : step + 1] = 7
    tensor.copy_(other.to_sparse().to(tensor.device))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ["weight", "fixed", "graph"])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_another_pattern_reaches_all_replicas(slots: list, root: torch.device, name: str, context: Callable) -> None:
    net = seeded(Sparse)().to(root)
    wrapped = replicate(net, devices=slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for step in range(4):
        with torch.no_grad():
            with_another_pattern(getattr(net, name), step)
        expected = [tensor.detach().cpu().to_dense() for tensor in (net.weight, net.fixed, net.graph)]
        net.seen.clear()
        with context():
            output = wrapped(x)
        assert len(net.seen) == len(slots)
        for seen in net.seen:
            assert all(map(torch.equal, seen, expected))
        if output.requires_grad:
            output.sum().backward()
