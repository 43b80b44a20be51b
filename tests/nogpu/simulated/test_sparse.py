"""Sparse tensors on a simulated device: COO, the compressed layouts, products that reduce."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from like_the_cpu import DEVICE, OTHER, assert_as_on_the_cpu, numbers

pytestmark = [
    pytest.mark.devices("sim"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]

INDICES = torch.tensor([[0, 2, 0, 1], [1, 0, 1, 2]])


def coo(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDICES.to(values.device), values, (3, 4))


def test_coo_tensors_travel() -> None:
    tensor = coo(numbers(4))
    there = tensor.to(DEVICE)
    assert (there.device, there.to(OTHER).device, there.cpu().device.type) == (DEVICE, OTHER, "cpu")
    torch.testing.assert_close(there.to(OTHER).to_dense().cpu(), tensor.to_dense())
    torch.testing.assert_close(there.cpu(), tensor)
    assert there.coalesce().indices().device == there.clone().device == DEVICE


@pytest.mark.parametrize(
    "function",
    [
        lambda v, d: torch.sparse.mm(coo(v), d),
        lambda v, d: (coo(v) + coo(v * 2)).to_dense(),
        lambda v, d: coo(v).coalesce().values(),
        lambda v, d: torch.sparse.sum(coo(v), dim=1).to_dense(),
        lambda v, d: d.t() + coo(v),
    ],
)
def test_arithmetic_of_coo_tensors(function: Callable[..., Tensor]) -> None:
    assert_as_on_the_cpu(function, numbers(4).requires_grad_(), numbers(4, 3).requires_grad_())


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
        products = [tensor @ vectors, (tensor + tensor).to_dense()] if layout == "csr" else []
        return [tensor.to_dense(), tensor.values(), (tensor * 2).to_dense(), *products]

    assert_as_on_the_cpu(use, dense_matrix(), numbers(6, 2))


@pytest.mark.parametrize("reduce", ["mean", "amax"])
def test_products_that_reduce_have_gradients(reduce: str) -> None:
    def product(values: Tensor, dense: Tensor) -> Tensor:
        rows, columns = (torch.tensor(part, device=values.device) for part in ([0, 2, 3, 4], [0, 2, 1, 0]))
        return torch.sparse.mm(torch.sparse_csr_tensor(rows, columns, values, (3, 3)), dense, reduce)

    assert_as_on_the_cpu(product, numbers(4).requires_grad_(), numbers(3, 2, seed=1).requires_grad_())


def test_sparse_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(coo(numbers(4).to(DEVICE)), coo(numbers(4).to(OTHER)))
    with pytest.raises(RuntimeError, match="same device"):
        torch.sparse.mm(coo(numbers(4).to(DEVICE)), numbers(4, 2))
