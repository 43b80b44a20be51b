"""Jagged nested tensors are cut along the batch, moved and joined again; gradients and raggedness come along."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nested import nested_tensor, nested_tensor_from_jagged

from dataparallel import DataParallel, gather, samples, scatter, whole
from dataparallel.composable import fully_shard, replicate

LENGTHS = [3, 1, 4, 0, 5, 2, 1]


def rows(lengths: list[int], device: Any) -> list[Tensor]:
    return [torch.randn(length, 2, dtype=torch.float64, device=device) for length in lengths]


def jagged(made: list[Tensor], requires_grad: bool = False) -> Any:
    return nested_tensor([*made], layout=torch.jagged, requires_grad=requires_grad)


def assert_rows(found: Any, wanted: list[Tensor], dim: int = 0) -> None:
    assert found.is_nested
    assert found.layout is torch.jagged
    assert found.shape[dim] == len(wanted)
    for one, other in zip(found.unbind(), wanted, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("chunk_sizes", [None, [1, 5, 1], [0.5, 0.25, 0.25]])
def test_chunks_come_back(chunk_sizes: Any, on_host: bool, slots: list, root: torch.device) -> None:
    made = rows(LENGTHS, "cpu" if on_host else root)
    parts = scatter((jagged(made), torch.arange(7)), slots, chunk_sizes=chunk_sizes)
    start = 0
    for slot, (part, numbers) in zip(slots, parts, strict=True):
        assert part.device == part.offsets().device == torch.device(slot)
        assert_rows(part, made[start : start + len(numbers)])
        start += len(numbers)
    joined = gather([part for part, _ in parts], root)
    assert joined.device == root
    assert_rows(joined, made)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 4))
def test_rows_of_any_lengths_come_back(make_slots: Any, lengths: list[int], count: int) -> None:
    slots = make_slots(count)
    made = rows(lengths, slots[0])
    assert_rows(gather(scatter(jagged(made), slots), slots[0]), made)


def test_other_ragged_dimensions_and_gaps(slots: list, root: torch.device) -> None:
    made = rows([3, 1, 4, 2], root)
    transposed = jagged(made).transpose(1, 2)
    assert_rows(gather(scatter(transposed, slots), root), [row.T for row in made])
    padded = torch.randn(5, 6, 2, device=root)
    starts, lengths = torch.tensor([1, 0, 2, 3, 0], device=root), torch.tensor([2, 6, 1, 3, 0], device=root)
    with_gaps = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    wanted = [row[a : a + b] for row, a, b in zip(padded, starts.tolist(), lengths.tolist(), strict=True)]
    parts = scatter(with_gaps, slots)
    assert_rows(parts[1], wanted[2:4])
    assert_rows(gather(parts, root), wanted)


def test_gradients_are_those_of_one_device(slots: list, root: torch.device) -> None:
    made = rows(LENGTHS, root)
    whole_batch, alone = jagged(made, requires_grad=True), jagged(made, requires_grad=True)
    parts = scatter(whole_batch, slots)
    joined = gather([part * part * part for part in parts], root)
    (joined.values() ** 2).sum().backward()
    ((alone * alone * alone).values() ** 2).sum().backward()
    torch.testing.assert_close(whole_batch.grad.values(), alone.grad.values(), rtol=1e-9, atol=1e-9)


def test_tensors_that_are_equally_ragged_stay_so(slots: list, root: torch.device) -> None:
    x = jagged(rows(LENGTHS, root))
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
    made = rows([3, 1, 4], root)
    x = jagged(made)
    parts = scatter(x, slots)
    assert_rows(gather([parts[2].to(root), parts[0].to(root)], root), [made[2], made[0]])
    again = scatter(jagged(rows([2, 5, 3], root)), slots)
    assert_rows(gather([parts[0], again[1]], root), [made[0], *again[1].unbind()])


def test_a_whole_one_goes_to_every_slot(slots: list, root: torch.device) -> None:
    made = rows([3, 1], root)
    source = jagged(made, requires_grad=True)
    parts = scatter((torch.arange(6).to(root), whole(source)), slots)
    for slot, (_, table) in zip(slots, parts, strict=True):
        assert table.device == torch.device(slot)
        assert_rows(table.detach(), made)
    sum((table.values() * 10**k).sum().to(root) for k, (_, table) in enumerate(parts)).backward()
    assert source.grad.values().unique().tolist() == [111]
    assert len(scatter(parts[1], slots)) == 2, "a mark stays"


def test_in_a_sample_it_is_moved_whole(slots: list, root: torch.device) -> None:
    made = [rows([k, 2], root) for k in range(6)]
    entries = [jagged(each, requires_grad=True) for each in made]
    parts = scatter(samples([{"x": each} for each in entries]), slots)
    outputs = [samples([sample["x"] * 3 for sample in part]) for part in parts]
    joined = gather(outputs, root)
    for found, wanted in zip(joined, made, strict=True):
        assert_rows(found.detach(), [row * 3 for row in wanted])
    sum(each.values().sum() for each in joined).backward()
    assert all(each.grad.values().unique().tolist() == [3] for each in entries)


class Encoder(nn.Module):
    """Keeps the rows apart: each is scaled by its own sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        hidden = nn.functional.silu(self.inside(x))
        return self.outside(hidden) + x


FORMS = {
    "DataParallel": DataParallel,
    "one slot": lambda net, slots: DataParallel(net, slots[:1]),
    "replicate": lambda net, slots: replicate(net, devices=slots),
    "fully_shard": lambda net, slots: fully_shard(net, devices=slots),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_jagged_batches_trains_as_on_one_device(form: str, slots: list, root: torch.device) -> None:
    torch.manual_seed(0)
    net, alone = Encoder().double().to(root), Encoder().double().to(root)
    alone.load_state_dict(net.state_dict())
    model = FORMS[form](net, slots)  # type: ignore[operator]
    x = jagged(rows(LENGTHS, "cpu"))
    for run in (model, alone):
        output = run(x.to(root) if run is alone else x)
        ((output - x.to(root)).values() ** 2).sum().backward()
    for found, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        grad: Any = found.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(grad, wanted.grad, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_split_is_named(slots: list, root: torch.device) -> None:
    strided = nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"input\[0\] cannot be split: it is a nested tensor.*layout=torch\.jagged"):
        scatter([strided], slots)
    with pytest.raises(ValueError, match=r"cannot gather output: it is a nested tensor.*torch\.jagged"):
        gather([strided, strided], root)
    with pytest.raises(ValueError, match="along dimension 0 only"):
        scatter(jagged(rows([1, 2], root)), slots, dim=1)
    with pytest.raises(ValueError, match=r"input\[0\] has 2, input\[1\] has 3"):
        scatter([jagged(rows([1, 2], root)), torch.ones(3)], slots)


def test_what_cannot_be_joined_is_named(root: torch.device) -> None:
    one = jagged(rows([1, 2], root))
    with pytest.raises(ValueError, match=r"output: replica 0 has shape \(2, \*, 2\), replica 1 has \(2, \*, 1\)"):
        gather([one, jagged([row[:, :1] for row in rows([1, 2], root)])], root)
    with pytest.raises(ValueError, match=r"replica 0 has dtype torch.float64, replica 1 has torch.float32"):
        gather([one, one.float()], root)
    with pytest.raises(ValueError, match=r"replica 0 returned a tensor of layout torch.jagged, replica 1 one of"):
        gather([one, torch.ones(2, 1, 2, device=root)], root)
