"""Sparse tensors on a simulated device: COO, the compressed layouts, sparse gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from like_the_cpu import DEVICE, OTHER, assert_as_on_the_cpu, made, numbers

pytestmark = [
    pytest.mark.devices("sim"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]

INDICES = torch.tensor([[0, 2, 0, 1], [1, 0, 1, 2]])


def coo(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDICES.to(values.device), values, (3, 4))


def test_coo_tensors_are_made_where_their_values_are() -> None:
    tensor = coo(numbers(4).to(DEVICE))
    assert tensor.device == DEVICE
    assert tensor.is_sparse
    assert not tensor.is_coalesced()
    assert tensor.coalesce().is_coalesced()
    assert tensor._indices().device == tensor._values().device == DEVICE
    assert tensor.coalesce().indices().tolist() == coo(numbers(4)).coalesce().indices().tolist()
    elsewhere = torch.sparse_coo_tensor(INDICES, numbers(4), (3, 4), device=DEVICE)
    assert elsewhere.device == DEVICE
    torch.testing.assert_close(elsewhere.to_dense().cpu(), coo(numbers(4)).to_dense())
    assert torch.sparse_coo_tensor((2, 2), device=DEVICE).device == DEVICE


def test_coo_tensors_travel() -> None:
    tensor = coo(numbers(4))
    there = tensor.to(DEVICE)
    assert (there.device, there.to(OTHER).device, there.cpu().device.type) == (DEVICE, OTHER, "cpu")
    torch.testing.assert_close(there.to(OTHER).to_dense().cpu(), tensor.to_dense())
    torch.testing.assert_close(there.cpu(), tensor)
    assert there.float().dtype == torch.float32
    assert "device='sim:1'" in repr(there)
    torch.testing.assert_close(there.clone().cpu(), tensor)


@pytest.mark.parametrize(
    "function",
    [
        lambda v, d: torch.sparse.mm(coo(v), d),
        lambda v, d: coo(v) @ d,
        lambda v, d: (coo(v) + coo(v * 2)).to_dense(),
        lambda v, d: coo(v).coalesce().values(),
        lambda v, d: (coo(v) * 3).to_dense() + d.t().sum(),
        lambda v, d: torch.sparse.sum(coo(v), dim=1).to_dense(),
        lambda v, d: torch.sparse.softmax(coo(v).coalesce(), 1).to_dense(),
        lambda v, d: d.t() + coo(v),
        lambda v, d: coo(v).t().to_dense(),
    ],
)
def test_arithmetic_of_coo_tensors(function: Callable[..., Tensor]) -> None:
    assert_as_on_the_cpu(function, numbers(4).requires_grad_(), numbers(4, 3).requires_grad_())


def test_coo_tensors_change_in_place() -> None:
    def change(values: Tensor, dense: Tensor) -> list[Tensor]:
        one = coo(values).coalesce()
        one.mul_(2)
        one.add_(coo(values))
        zeroed = coo(values).zero_()
        assert one.device == zeroed.device == values.device
        dense.add_(one)
        other = coo(values).clone()
        other.copy_(coo(values * 3))
        return [one.to_dense(), zeroed.to_dense(), dense, other.to_dense(), one.coalesce().values()]

    assert_as_on_the_cpu(change, numbers(4), numbers(3, 4))


def dense_matrix() -> Tensor:
    matrix = numbers(4, 6)
    return matrix.where(matrix > 0.2, 0.0)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_tensors(layout: str) -> None:
    def use(dense: Tensor, vectors: Tensor) -> list[Tensor]:
        block = (2, 2) if layout.startswith("b") else None
        tensor = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=block)
        assert tensor.device == tensor.values().device == dense.device
        assert tensor.to("cpu").device.type == "cpu"
        assert tensor.to(OTHER if dense.device.type == "sim" else "cpu").values().device.type == dense.device.type
        return [tensor.to_dense(), tensor.values(), (tensor * 2).to_dense(), *(parts(tensor, vectors))]

    def parts(tensor: Tensor, vectors: Tensor) -> list[Tensor]:
        if layout != "csr":
            return []
        product = tensor @ vectors
        total = (tensor + tensor).to_dense()
        return [product, total, torch.addmm(product, tensor, vectors), tensor.crow_indices(), tensor.relu().to_dense()]

    assert_as_on_the_cpu(use, dense_matrix(), numbers(6, 2))


def test_csr_tensors_are_made_from_their_parts() -> None:
    tensor = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([0, 1], device=DEVICE), numbers(2).to(DEVICE), (2, 3)
    )
    assert tensor.device == DEVICE
    torch.testing.assert_close(tensor.mul_(2).to_dense().cpu(), F.pad(numbers(2).diag() * 2, (0, 1)))


@pytest.mark.parametrize("needs_gradient", ["matrix", "dense", "both"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_products_that_reduce_have_gradients(reduce: str, needs_gradient: str) -> None:
    def product(values: Tensor, dense: Tensor) -> Tensor:
        rows, columns = (torch.tensor(part, device=values.device) for part in ([0, 2, 3, 4], [0, 2, 1, 0]))
        matrix = torch.sparse_csr_tensor(rows, columns, values, (3, 3))
        return torch.sparse.mm(matrix, dense, reduce)

    values = numbers(4).requires_grad_(needs_gradient != "dense")
    dense = numbers(3, 2, seed=1).requires_grad_(needs_gradient != "matrix")
    assert_as_on_the_cpu(product, values, dense)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_and_their_gradients(sparse: bool) -> None:
    def look_up(weight: Tensor) -> tuple[Tensor, ...]:
        index = torch.tensor([[1, 2], [4, 1]], device=weight.device)
        offsets = torch.tensor([0, 3], device=weight.device)
        rows = F.embedding(index, weight, padding_idx=4, sparse=sparse)
        bags = F.embedding_bag(index.flatten(), weight, offsets, mode="sum", sparse=sparse)
        means = F.embedding_bag(index, weight, mode="mean", sparse=sparse)
        return rows, bags, means

    assert_as_on_the_cpu(look_up, numbers(6, 3).requires_grad_())


def test_sparse_adam_updates_rows_in_use() -> None:
    def train(device: torch.device | str) -> Tensor:
        table = made(nn.Embedding, 6, 3, sparse=True).to(device)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 1], device=device)).square().sum().backward()
            assert table.weight.grad.is_sparse
            assert table.weight.grad.device == torch.device(device)
            optimizer.step()
        return table.weight.detach().cpu()

    torch.testing.assert_close(train(DEVICE), train("cpu"))


def test_sparse_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(coo(numbers(4).to(DEVICE)), coo(numbers(4).to(OTHER)))
    with pytest.raises(RuntimeError, match="same device"):
        torch.sparse.mm(coo(numbers(4).to(DEVICE)), numbers(4, 2))
