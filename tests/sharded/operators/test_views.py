"""Views of sharded tensors: what is written to a row, a slice or a transpose is in the whole, as on one device."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from fake_machines import FakeOver, on_fake_machines, owners_of
from sharding import full, sharded

View = Callable[[Tensor], Tensor]

# Of 7 x 4. Seven rows on three devices are 3, 3 and 1, and the four columns 2, 2 and 0.
VIEWS: dict[str, View] = {
    "a row": lambda x: x[4],
    "the last row": lambda x: x[-1],
    "rows of two owners": lambda x: x[1:5],
    "the last rows": lambda x: x[-2:],
    "every other row": lambda x: x[1::2],
    "no row": lambda x: x[3:3],
    "all rows": lambda x: x[:100],
    "a column": lambda x: x[:, -1],
    "columns": lambda x: x[:, 1:3],
    "rows and columns": lambda x: x[2:6, 1:],
    "rows of rows": lambda x: x[1:6][1:3],
    "a row of rows": lambda x: x[2:6][-1],
    "a chunk": lambda x: x.chunk(3)[1],
    "a split": lambda x: x.split([1, 4, 2])[1],
    "one of all": lambda x: x.unbind()[4],
    "narrow": lambda x: x.narrow(0, 2, 3),
    "the transpose": lambda x: x.T,
    "a row of the transpose": lambda x: x.T[1],
    "columns of the transpose": lambda x: x.T[:, 2:6],
    "permuted": lambda x: x.permute(1, 0),
    "one more dimension": lambda x: x[None],
    "an element": lambda x: x[4, 2],
    "a vector": lambda x: x.view(-1),
    "a vector and back": lambda x: x.view(-1).view(7, 4),
    "more dimensions": lambda x: x.view(7, 2, 2),
    "a slice of a vector": lambda x: x[1:4].view(-1)[3:9],
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(3),
    "mul_": lambda x: x.mul_(2),
    "add_ a plain tensor": lambda x: x.add_(torch.arange(x.numel(), device=x.device).view(x.shape)),
    "copy_ a plain tensor": lambda x: x.copy_(torch.arange(x.numel()).view(x.shape)),
    "copy_ what was computed from it": lambda x: x.copy_(x * 2 + 1),
    "normal_": lambda x: (torch.manual_seed(0), x.normal_()),
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], 3),
}
# Parts of columns hold no whole rows of another shape.
OF_COLUMNS_REFUSED = {"a vector", "a vector and back", "more dimensions", "a slice of a vector"}


def values(device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(28.0, dtype=torch.float64, device=device).view(7, 4)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_to_them_is_in_the_whole(slots: list, view: str, placement: Any) -> None:
    if placement == Shard(1) and view in OF_COLUMNS_REFUSED:
        with pytest.raises(NotImplementedError, match="view"):
            VIEWS[view](sharded(values(), slots, placement))
        return
    for name, write in WRITES.items():
        whole, divided = values(slots[0]), sharded(values(), slots, placement)  # draws are those of the first owner
        seen, ours = VIEWS[view](whole), VIEWS[view](divided)
        assert type(ours) is ShardedTensor
        assert (ours.shape, ours.stride(), ours.storage_offset()) == (seen.shape, seen.stride(), seen.storage_offset())
        write(seen)
        write(ours)
        assert torch.equal(full(divided), whole.cpu()), name
        assert torch.equal(full(ours), seen.cpu()), name
        assert torch.equal(ours.full_tensor("cpu"), seen.cpu()), name
        torch.testing.assert_close(ours.sum().cpu(), seen.sum().cpu())


@pytest.mark.slots(4)
@pytest.mark.parametrize("machines", [2, 4])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_they_are_those_of_all_machines(slots: list, placement: Any, machines: int) -> None:
    def write_to_all(over: FakeOver) -> None:
        for name, view in VIEWS.items():
            if name == "an element" or (placement == Shard(1) and name in OF_COLUMNS_REFUSED):
                continue
            for write in (WRITES["fill_"], WRITES["copy_ what was computed from it"], WRITES["normal_"]):
                whole, divided = values(slots[0]), sharded(values(), owners_of(slots, over), placement)
                seen, ours = view(whole), view(divided)
                write(seen)
                write(ours)
                assert torch.equal(full(divided), whole.cpu()), name
                assert torch.equal(ours.full_tensor("cpu"), seen.cpu()), name
                torch.testing.assert_close(ours.norm().cpu(), seen.norm().cpu())

    on_fake_machines(write_to_all, machines)


@pytest.mark.slots(4)
def test_an_element_of_a_vector_over_machines_is_refused(slots: list) -> None:
    def take(over: FakeOver) -> None:
        with pytest.raises(NotImplementedError, match=r"select.*over machines.*full_tensor\(\)"):
            sharded(torch.ones(9), owners_of(slots, over))[3]

    on_fake_machines(take)


def test_items_are_assigned(slots: list) -> None:
    whole, divided = values(), sharded(values(), slots)
    for x in (whole, divided):
        x[2] = 5
        x[-3:-1, 0] = torch.tensor([1.0, 2.0], dtype=x.dtype)
        x[..., 3] = -1
    assert torch.equal(full(divided), whole)
    with pytest.raises(IndexError):
        divided[7]


def test_slices_are_copied_into_each_other(slots: list) -> None:
    whole, divided = values(), sharded(values(), slots)
    for x in (whole, divided):
        x[0:3] = x[4:7]
        x[6] = x[0]
    assert torch.equal(full(divided), whole)


def test_an_embedding_gets_its_padding_row(slots: list) -> None:
    whole = nn.Embedding(11, 4, padding_idx=-2, device=slots[0])  # a GPU draws other numbers than the CPU
    divided = nn.Embedding(11, 4, padding_idx=-2)
    divided.weight = nn.Parameter(sharded(torch.ones(11, 4), slots))
    for module in (whole, divided):
        torch.manual_seed(1)
        module.reset_parameters()
    assert torch.equal(full(divided.weight), whole.weight.cpu())
    assert not full(divided.weight)[9].any()


def test_slices_are_pickled_divided_anew(slots: list) -> None:
    file = io.BytesIO()
    torch.save(sharded(values(), slots)[1:6], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.placement == Shard(0)
    assert torch.equal(full(loaded), values()[1:6])
