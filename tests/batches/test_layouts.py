"""Sparse COO tensors are cut along rows and joined. Tensors of other layouts go to all slots whole, or are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nested import nested_tensor

import each_form
from dataparallel import gather, samples, scatter, whole
from each_form import Form

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

SPARSE = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}
LENGTHS = [3, 1, 4, 0, 5, 2, 1]

every_kind = pytest.mark.parametrize("kind", [*SPARSE, "jagged"])


def dense(device: Any = "cpu", rows: int = 7) -> Tensor:
    """Row ``i`` has ``i % 4`` values; the first one and the fifth are empty."""
    made = torch.zeros(rows, 5, dtype=torch.float64, device=device)
    for row in range(rows):
        for column in range(row % 4):
            made[row, (row + 2 * column) % 5] = row + 10 * column + 1
    return made


def ragged(lengths: list[int], device: Any) -> list[Tensor]:
    return [torch.randn(length, 2, dtype=torch.float64, device=device) for length in lengths]


def rows_for(kind: str, device: Any) -> list[Tensor]:
    return ragged(LENGTHS, device) if kind == "jagged" else [*dense(device)]


def jagged(rows: list[Tensor], requires_grad: bool = False) -> Any:
    return nested_tensor([*rows], layout=torch.jagged, requires_grad=requires_grad)


def built(kind: str, rows: list[Tensor]) -> Any:
    return jagged(rows) if kind == "jagged" else SPARSE[kind](torch.stack(rows))


def values_of(tensor: Any) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor.to_dense()


def assert_rows(found: Any, wanted: list[Tensor], kind: str = "jagged") -> None:
    assert found.layout is {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "jagged": torch.jagged}[kind]
    assert found.shape[0] == len(wanted)
    for one, other in zip((found if found.is_nested else found.to_dense()).unbind(), wanted, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("chunk_sizes", [None, [1, 4, 2], [0.2, 0.2, 0.6]])
def test_rows_come_back(on_host: bool, chunk_sizes: Any, slots: list, root: torch.device) -> None:
    rows = rows_for("coo", "cpu" if on_host else root)
    parts = scatter((built("coo", rows), torch.arange(7)), slots, chunk_sizes=chunk_sizes)
    start = 0
    for slot, (part, numbers) in zip(slots, parts, strict=True):
        assert part.device == torch.device(slot)
        assert_rows(part, rows[start : start + len(numbers)], "coo")
        start += len(numbers)
    joined = gather([part for part, _ in parts], root)
    assert joined.device == root
    assert_rows(joined, rows, "coo")


@every_kind
def test_whole_and_in_samples(kind: str, slots: list, root: torch.device) -> None:
    rows = rows_for(kind, root)
    table = built(kind, rows).requires_grad_()
    entry = built(kind, rows).requires_grad_()
    parts = scatter((torch.arange(6), whole(table), samples([entry] * 6)), slots)
    for slot, (_, one, entries) in zip(slots, parts, strict=True):
        for found in (one, *entries):
            assert found.device == torch.device(slot)
            assert_rows(found.detach(), rows, kind)
    assert len(scatter(parts[1], slots)) == 2, "a mark stays"
    joined = gather([part[2] for part in parts], root)
    assert_rows(joined[5].detach(), rows, kind)
    if kind == "jagged":
        sum(each.values().sum() for each in joined).backward()
        assert entry.grad.values().unique().tolist() == [6]
    sum((values_of(part[1]) * 10**slot).sum().to(root) for slot, part in enumerate(parts)).backward()
    gradient = values_of(table.grad)
    assert gradient[gradient != 0].unique().tolist() == [111]
    assert torch.equal(gradient != 0, values_of(built(kind, rows)) != 0)


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(rows, self.weight))


@pytest.mark.slots(1, 3)
def test_a_model_of_sparse_batches_trains_as_on_one_device(form: Form, slots: list, root: torch.device) -> None:
    torch.manual_seed(0)
    net, alone = Embedder().double().to(root), Embedder().double().to(root)
    alone.load_state_dict(net.state_dict())
    x = dense("cpu").to_sparse()
    for run, given in ((form(net, slots), x), (alone, x.to(root))):
        (run(given) ** 2).sum().backward()
    for found, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(each_form.whole(found.grad), wanted.grad, rtol=1e-9, atol=1e-9)


LAYOUTS = {
    "torch.sparse_csr": lambda device: dense(device).to_sparse_csr(),
    "torch.sparse_bsc": lambda device: dense(device, rows=6)[:, :4].to_sparse_bsc((2, 2)),
    "torch.jagged": lambda device: jagged(ragged(LENGTHS, device)),
    "torch.strided": lambda device: nested_tensor(ragged(LENGTHS, device), layout=torch.strided),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_refused_by_name(layout: str, slots: list, root: torch.device) -> None:
    tensor = LAYOUTS[layout](root)
    with pytest.raises(ValueError, match=rf"input\[0\] cannot be split: it.* layout.*{layout}; .*register_batch"):
        scatter([tensor], slots)
    with pytest.raises(ValueError, match=rf"cannot gather output: it.* layout.*{layout}; .*register_batch"):
        gather([tensor, tensor], root)


def test_replicas_return_tensors_of_one_layout(root: torch.device) -> None:
    with pytest.raises(ValueError, match=r"layout torch.sparse_coo, replica 1 one of layout torch.strided"):
        gather([dense(root).to_sparse(), dense(root)], root)
