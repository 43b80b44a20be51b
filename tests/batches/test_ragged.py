"""Sparse matrices and jagged nested tensors are cut along rows, moved and joined, and gradients come along."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nested import nested_tensor, nested_tensor_from_jagged

from dataparallel import DataParallel, gather, samples, scatter, whole
from dataparallel.composable import fully_shard, replicate

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

SPARSE = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}
LENGTHS = [3, 1, 4, 0, 5, 2, 1]

every_sparse = pytest.mark.parametrize("kind", SPARSE)
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


@every_kind
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("chunk_sizes", [None, [1, 4, 2], [0.2, 0.2, 0.6]])
def test_rows_come_back(kind: str, on_host: bool, chunk_sizes: Any, slots: list, root: torch.device) -> None:
    rows = rows_for(kind, "cpu" if on_host else root)
    parts = scatter((built(kind, rows), torch.arange(7)), slots, chunk_sizes=chunk_sizes)
    start = 0
    for slot, (part, numbers) in zip(slots, parts, strict=True):
        assert part.device == torch.device(slot)
        assert_rows(part, rows[start : start + len(numbers)], kind)
        start += len(numbers)
    joined = gather([part for part, _ in parts], root)
    assert joined.device == root
    assert_rows(joined, rows, kind)


@every_sparse
@pytest.mark.parametrize("rows", [1, 2, 0])
def test_there_may_be_fewer_rows_than_slots(kind: str, rows: int, slots: list, root: torch.device) -> None:
    made = torch.ones(rows, 5, device=root)
    parts = scatter(SPARSE[kind](made), slots)
    assert len(parts) == max(rows, 1)
    assert torch.equal(gather(parts, root).to_dense(), made)


@every_sparse
def test_chunks_without_a_value(kind: str, slots: list, root: torch.device) -> None:
    made = torch.zeros(6, 5, device=root)
    made[5, 1] = 2
    parts = scatter(SPARSE[kind](made), slots)
    assert [part.values().numel() if kind == "csr" else part._nnz() for part in parts] == [0, 0, 1]
    assert torch.equal(gather(parts, root).to_dense(), made)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 4))
def test_jagged_rows_of_any_lengths_come_back(make_slots: Any, lengths: list[int], count: int) -> None:
    slots = make_slots(count)
    rows = ragged(lengths, slots[0])
    assert_rows(gather(scatter(jagged(rows), slots), slots[0]), rows)


def test_other_ragged_dimensions_and_gaps(slots: list, root: torch.device) -> None:
    rows = ragged([3, 1, 4, 2], root)
    transposed = jagged(rows).transpose(1, 2)
    assert_rows(gather(scatter(transposed, slots), root), [row.T for row in rows])
    padded = torch.randn(5, 6, 2, device=root)
    starts, lengths = torch.tensor([1, 0, 2, 3, 0], device=root), torch.tensor([2, 6, 1, 3, 0], device=root)
    with_gaps = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    wanted = [row[a : a + b] for row, a, b in zip(padded, starts.tolist(), lengths.tolist(), strict=True)]
    parts = scatter(with_gaps, slots)
    assert_rows(parts[1], wanted[2:4])
    assert_rows(gather(parts, root), wanted)


@every_sparse
def test_gradients_reach_the_values_of_a_matrix(kind: str, slots: list, root: torch.device) -> None:
    weight = torch.randn(5, 3, dtype=torch.float64, device=root)
    found, alone = (SPARSE[kind](dense(root)).requires_grad_() for _ in range(2))
    outputs = [torch.sparse.mm(part, weight.to(part.device)) for part in scatter(found, slots, chunk_sizes=[1, 4, 2])]
    (gather(outputs, root) ** 2).sum().backward()
    (torch.sparse.mm(alone, weight) ** 2).sum().backward()
    assert found.grad.layout is alone.grad.layout
    torch.testing.assert_close(found.grad.to_dense(), alone.grad.to_dense(), rtol=1e-9, atol=1e-9)


def test_gradients_come_through_joined_matrices(slots: list, root: torch.device) -> None:
    def matrix(values: Tensor, like: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(like.crow_indices(), like.col_indices(), values, like.shape)

    values = torch.arange(1.0, 10.0, dtype=torch.float64, device=root, requires_grad=True)
    parts = scatter(matrix(values, dense(root).to_sparse_csr()), slots)
    joined = gather([matrix(part.values() ** 2, part) for part in parts], root)
    (joined.values() * 3).sum().backward()
    torch.testing.assert_close(values.grad, 6 * values.detach(), rtol=1e-9, atol=1e-9)


def test_gradients_of_jagged_rows_are_those_of_one_device(slots: list, root: torch.device) -> None:
    rows = ragged(LENGTHS, root)
    whole_batch, alone = jagged(rows, requires_grad=True), jagged(rows, requires_grad=True)
    parts = scatter(whole_batch, slots)
    joined = gather([part * part * part for part in parts], root)
    (joined.values() ** 2).sum().backward()
    ((alone * alone * alone).values() ** 2).sum().backward()
    torch.testing.assert_close(whole_batch.grad.values(), alone.grad.values(), rtol=1e-9, atol=1e-9)


def test_tensors_that_are_equally_ragged_stay_so(slots: list, root: torch.device) -> None:
    x = jagged(ragged(LENGTHS, root))
    mask = nested_tensor_from_jagged(torch.rand(len(x.values()), 2, dtype=torch.float64, device=root), x.offsets())
    parts = scatter((x, {"mask": mask}), slots)
    outputs = [(part * rest["mask"], part + 1) for part, rest in parts]
    product, more = gather(outputs, root)
    torch.testing.assert_close((product + more).values(), (x * mask + x + 1).values())
    torch.testing.assert_close((product - x).values(), (x * mask - x).values())
    on_host = x.cpu()
    moved = gather(scatter(on_host, slots), root)
    torch.testing.assert_close((moved + on_host.to(root)).values(), (x + x).values())


def test_parts_of_other_calls_are_joined_with_offsets_of_their_own(slots: list, root: torch.device) -> None:
    rows = ragged([3, 1, 4], root)
    parts = scatter(jagged(rows), slots)
    assert_rows(gather([parts[2].to(root), parts[0].to(root)], root), [rows[2], rows[0]])
    again = scatter(jagged(ragged([2, 5, 3], root)), slots)
    assert_rows(gather([parts[0], again[1]], root), [rows[0], *again[1].unbind()])


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


class Encoder(nn.Module):
    """Keeps jagged rows apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.outside(nn.functional.silu(self.inside(x))) + x


FORMS = {
    "DataParallel": DataParallel,
    "one slot": lambda net, slots: DataParallel(net, slots[:1]),
    "replicate": lambda net, slots: replicate(net, devices=slots),
    "fully_shard": lambda net, slots: fully_shard(net, devices=slots),
}


@every_kind
@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_such_batches_trains_as_on_one_device(kind: str, form: str, slots: list, root: torch.device) -> None:
    torch.manual_seed(0)
    make = Encoder if kind == "jagged" else Embedder
    net, alone = make().double().to(root), make().double().to(root)
    alone.load_state_dict(net.state_dict())
    model = FORMS[form](net, slots)  # type: ignore[operator]
    x = built(kind, rows_for(kind, "cpu"))
    for run in (model, alone):
        output = run(x.to(root) if run is alone else x)
        ((output.values() if kind == "jagged" else output) ** 2).sum().backward()
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


def test_what_cannot_be_split_is_named(slots: list, root: torch.device) -> None:
    with pytest.raises(ValueError, match=r"torch\.sparse_csr are split along dimension 0 only"):
        scatter(dense(root).to_sparse_csr(), slots, dim=1)
    with pytest.raises(ValueError, match="a batch of CSR matrices"):
        scatter(torch.ones(2, 3, 3, device=root).to_sparse_csr(), slots)
    strided = nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"input\[0\] cannot be split: it is a nested tensor.*layout=torch\.jagged"):
        scatter([strided], slots)
    with pytest.raises(ValueError, match=r"cannot gather output: it is a nested tensor.*torch\.jagged"):
        gather([strided, strided], root)
    with pytest.raises(ValueError, match="along dimension 0 only"):
        scatter(jagged(ragged([1, 2], root)), slots, dim=1)
    with pytest.raises(ValueError, match=r"input\[0\] has 2, input\[1\] has 3"):
        scatter([jagged(ragged([1, 2], root)), torch.ones(3)], slots)


def test_what_cannot_be_joined_is_named(root: torch.device) -> None:
    rows = dense(root)
    with pytest.raises(ValueError, match=r"layout torch.sparse_csr, replica 1 one of layout torch.strided"):
        gather([rows.to_sparse_csr(), rows], root)
    with pytest.raises(ValueError, match=r"replica 0 has shape \(7, 5\), replica 1 has \(7, 4\)"):
        gather([rows.to_sparse_csr(), rows[:, :4].to_sparse_csr()], root)
    one = jagged(ragged([1, 2], root))
    with pytest.raises(ValueError, match=r"output: replica 0 has shape \(2, \*, 2\), replica 1 has \(2, \*, 1\)"):
        gather([one, jagged([row[:, :1] for row in ragged([1, 2], root)])], root)
    with pytest.raises(ValueError, match=r"replica 0 has dtype torch.float64, replica 1 has torch.float32"):
        gather([one, one.float()], root)
    with pytest.raises(ValueError, match=r"replica 0 returned a tensor of layout torch.jagged, replica 1 one of"):
        gather([one, torch.ones(2, 1, 2, device=root)], root)
