"""Sparse parameters and buffers of persistent replicas have the source's values at every forward."""

from collections.abc import Callable

import pytest
import torch
from loops import assert_same_loop, mean_square, waits
from persistent import with_persistent_replicas
from torch import Tensor, nn

from dataparallel.testing.cases import seeded

pytestmark = [pytest.mark.usefixtures("one_intra_op_thread"), pytest.mark.filterwarnings("ignore:Sparse")]


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
    wrapped = with_persistent_replicas(net, slots)
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


def test_training_is_that_of_one_device(slots: list, root: torch.device) -> None:
    def loop(net: Sparse) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(6):
            x = torch.randn(2 * len(slots) + 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            with waits(net) if step % 2 == 0 else torch.enable_grad():
                mean_square(net(x.to(root))).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    net.graph.mul_(1.1)

    assert_same_loop(loop, slots, seeded(Sparse))
