"""Sparse COO and CSR matrices are cut along rows, moved and joined; gradients reach their values."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import DataParallel, gather, samples, scatter, whole
from dataparallel.composable import fully_shard, replicate

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

LAYOUTS = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def dense(device: Any = "cpu", rows: int = 7) -> Tensor:
    """Row ``i`` has ``i % 4`` values; the first one and the fifth are empty."""
    made = torch.zeros(rows, 5, dtype=torch.float64, device=device)
    for row in range(rows):
        for column in range(row % 4):
            made[row, (row + 2 * column) % 5] = row + 10 * column + 1
    return made


@every_layout
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("chunk_sizes", [None, [1, 4, 2], [0.2, 0.2, 0.6]])
def test_rows_come_back(layout: str, on_host: bool, chunk_sizes: Any, slots: list, root: torch.device) -> None:
    rows = dense("cpu" if on_host else root)
    parts = scatter((LAYOUTS[layout](rows), torch.arange(7)), slots, chunk_sizes=chunk_sizes)
    start = 0
    for slot, (part, numbers) in zip(slots, parts, strict=True):
        assert part.layout is LAYOUTS[layout](rows).layout
        assert part.device == torch.device(slot)
        assert torch.equal(part.to_dense().cpu(), rows[start : start + len(numbers)].cpu())
        start += len(numbers)
    joined = gather([part for part, _ in parts], root)
    assert joined.layout is LAYOUTS[layout](rows).layout
    assert joined.device == root
    assert torch.equal(joined.to_dense().cpu(), rows.cpu())


@every_layout
@pytest.mark.parametrize("rows", [1, 2, 0])
def test_there_may_be_fewer_rows_than_slots(layout: str, rows: int, slots: list, root: torch.device) -> None:
    made = torch.ones(rows, 5, device=root)
    parts = scatter(LAYOUTS[layout](made), slots)
    assert len(parts) == max(rows, 1)
    assert torch.equal(gather(parts, root).to_dense(), made)


@every_layout
def test_chunks_without_a_value(layout: str, slots: list, root: torch.device) -> None:
    made = torch.zeros(6, 5, device=root)
    made[5, 1] = 2
    parts = scatter(LAYOUTS[layout](made), slots)
    assert [part.values().numel() if layout == "csr" else part._nnz() for part in parts] == [0, 0, 1]
    assert torch.equal(gather(parts, root).to_dense(), made)


@every_layout
def test_gradients_reach_the_values(layout: str, slots: list, root: torch.device) -> None:
    weight = torch.randn(5, 3, dtype=torch.float64, device=root)
    found, alone = (LAYOUTS[layout](dense(root)).requires_grad_() for _ in range(2))
    outputs = [torch.sparse.mm(part, weight.to(part.device)) for part in scatter(found, slots, chunk_sizes=[1, 4, 2])]
    (gather(outputs, root) ** 2).sum().backward()
    (torch.sparse.mm(alone, weight) ** 2).sum().backward()
    assert found.grad.layout is alone.grad.layout
    torch.testing.assert_close(found.grad.to_dense(), alone.grad.to_dense(), rtol=1e-9, atol=1e-9)


def test_gradients_come_through_joined_outputs(slots: list, root: torch.device) -> None:
    values = torch.arange(1.0, 10.0, dtype=torch.float64, device=root, requires_grad=True)
    source = dense(root).to_sparse_csr()
    made = torch.sparse_csr_tensor(source.crow_indices(), source.col_indices(), values, source.shape)
    parts = scatter(made, slots)
    joined = gather(
        [
            torch.sparse_csr_tensor(part.crow_indices(), part.col_indices(), part.values() ** 2, part.shape)
            for part in parts
        ],
        root,
    )
    (joined.values() * 3).sum().backward()
    torch.testing.assert_close(values.grad, 6 * values.detach(), rtol=1e-9, atol=1e-9)


@every_layout
def test_whole_and_in_samples(layout: str, slots: list, root: torch.device) -> None:
    table = LAYOUTS[layout](dense(root))
    parts = scatter((torch.arange(6), whole(table), samples([table] * 6)), slots)
    for slot, (_, one, entries) in zip(slots, parts, strict=True):
        for found in (one, *entries):
            assert found.device == torch.device(slot)
            assert torch.equal(found.to_dense().cpu(), dense())
    assert torch.equal(gather([part[2] for part in parts], root)[5].to_dense(), dense(root))


@every_layout
def test_gradients_of_a_whole_one_are_summed(layout: str, slots: list, root: torch.device) -> None:
    table = LAYOUTS[layout](dense(root)).requires_grad_()
    parts = scatter((torch.arange(6), whole(table)), slots)
    sum((part[1].to_dense() * 10**slot).sum().to(root) for slot, part in enumerate(parts)).backward()
    assert torch.equal(table.grad.to_dense() != 0, dense(root) != 0)
    assert table.grad.to_dense().unique().tolist() == [0, 111]


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(rows, self.weight))


FORMS = {
    "DataParallel": DataParallel,
    "one slot": lambda net, slots: DataParallel(net, slots[:1]),
    "replicate": lambda net, slots: replicate(net, devices=slots),
    "fully_shard": lambda net, slots: fully_shard(net, devices=slots),
}


@every_layout
@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_sparse_rows_trains_as_on_one_device(layout: str, form: str, slots: list, root: Any) -> None:
    torch.manual_seed(0)
    net, alone = Embedder().double().to(root), Embedder().double().to(root)
    alone.load_state_dict(net.state_dict())
    model = FORMS[form](net, slots)  # type: ignore[operator]
    rows = LAYOUTS[layout](dense())
    for run in (model, alone):
        (run(rows.to(root) if run is alone else rows) ** 2).sum().backward()
    for found, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        grad: Any = found.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(grad, wanted.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_other_layouts_are_refused_by_name(layout: str, slots: list, root: torch.device) -> None:
    made = dense(root, rows=6)[:, :4]
    other = made.to_sparse(layout=getattr(torch, layout), blocksize=None if layout == "sparse_csc" else (2, 2))
    with pytest.raises(ValueError, match=rf"input cannot be split: .*torch\.{layout}.*to_sparse_csr\(\)"):
        scatter(other, slots)
    with pytest.raises(ValueError, match=rf"cannot gather output: .*torch\.{layout}.*sparse COO or CSR"):
        gather([other, other], root)


def test_csr_is_split_along_rows_of_one_matrix(slots: list, root: torch.device) -> None:
    with pytest.raises(ValueError, match=r"torch\.sparse_csr are split along dimension 0 only"):
        scatter(dense(root).to_sparse_csr(), slots, dim=1)
    with pytest.raises(ValueError, match="a batch of CSR matrices"):
        scatter(torch.ones(2, 3, 3, device=root).to_sparse_csr(), slots)


def test_what_cannot_be_joined_is_named(root: torch.device) -> None:
    rows = dense(root)
    with pytest.raises(ValueError, match=r"layout torch.sparse_csr, replica 1 one of layout torch.strided"):
        gather([rows.to_sparse_csr(), rows], root)
    with pytest.raises(ValueError, match=r"replica 0 has shape \(7, 5\), replica 1 has \(7, 4\)"):
        gather([rows.to_sparse_csr(), rows[:, :4].to_sparse_csr()], root)
