"""Tensors of kept replicas have the source's values at every forward, whichever thread calls."""

from collections.abc import Callable

import pytest
import torch
from kept import Branched, gradients, loss, numbers, settled, with_kept_replicas
from torch import Tensor, nn

from at_once import in_threads
from dataparallel.testing.cases import seeded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture
def x(slots: list, root: torch.device) -> Tensor:
    return numbers(root, 2 * len(slots) + 1)


@pytest.mark.parametrize("of", ["parameters", "input"])
def test_a_graph_whose_values_are_gone_raises_as_on_one_device(net: Branched, slots: list, x: Tensor, of: str) -> None:
    """The second forward writes other values to the memory that the first one's backward would read."""
    wrapped = settled(net, slots, x)
    leaf = x.clone().requires_grad_()
    value = loss(wrapped(leaf))
    with torch.no_grad():
        net.second.weight.mul_(2)
    wrapped(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, [leaf] if of == "input" else list(net.parameters()))
    assert gradients(net) == [None] * len(gradients(net))


def test_several_threads_may_call(net: Branched, twin: Branched, slots: list, x: Tensor) -> None:
    wrapped = settled(net, slots, x)
    expected = twin(x).detach()

    def call(*_: object) -> None:
        for _ in range(10):
            torch.testing.assert_close(wrapped(x).detach(), expected, rtol=0, atol=1e-9)

    in_threads(3, call)


class Sparse(nn.Module):
    """Has a weight in COO layout, and the same layout in a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).relu().to_sparse())
        self.frozen = nn.Parameter(torch.randn(4, 4).relu().to_sparse(), requires_grad=False)
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.seen: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.weight, self.frozen, self.graph]
        self.seen.append([tensor.detach().cpu().to_dense() for tensor in tensors])
        y = torch.sparse.mm(self.graph, torch.sparse.mm(self.frozen, x.t()))
        return torch.sparse.mm(self.weight, y).t()


def scaled(tensor: Tensor, step: int) -> None:
    tensor.mul_(2)


def with_another_pattern(tensor: Tensor, step: int) -> None:
    other = torch.zeros(4, 4, dtype=tensor.dtype)
    other[0, step] = other[2, : step + 1] = 7
    tensor.copy_(other.to_sparse().to(tensor.device))


@pytest.mark.parametrize("name", ["weight", "frozen", "graph"])
@pytest.mark.parametrize("change", [scaled, with_another_pattern])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_a_change_in_place_reaches_all_replicas(
    slots: list, root: torch.device, change: Callable, name: str, context: Callable
) -> None:
    net = seeded(Sparse)().to(root)
    wrapped = with_kept_replicas(net, slots)
    x = torch.ones(len(slots), 4, dtype=torch.float64, device=root)
    for step in range(4):
        with torch.no_grad():
            change(getattr(net, name), step)
        expected = [tensor.detach().cpu().to_dense() for tensor in (net.weight, net.frozen, net.graph)]
        net.seen.clear()
        with context():
            output = wrapped(x)
        assert len(net.seen) == len(slots)
        for seen in net.seen:
            assert all(map(torch.equal, seen, expected))
        if output.requires_grad:
            output.sum().backward()
