"""Views of sharded tensors: what is written to a row, a slice or a transpose is in the whole, as on one device."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor
from sharding import full, sharded

View = Callable[[Tensor], Tensor]

# Of 7 x 4. Seven rows on six devices are 2, 2, 2, 1, 0 and 0, and the four columns 1, 1, 1, 1, 0 and 0.
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
    "the diagonal": lambda x: x.diagonal(),
    "rows that are cut": lambda x: x.view(4, 7)[1],
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
ONLY_COPIES = ["zero_", "fill_", "copy_ a plain tensor", "normal_"]


def values(device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(28.0, dtype=torch.float64, device=device).view(7, 4)


@pytest.mark.slots(6)
@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_to_them_is_in_the_whole(on_owners: Any, root: torch.device, view: str, placement: Any) -> None:
    """On each machine too."""

    def write_to_all(owners: Any) -> None:
        for name, write in WRITES.items():
            whole, divided = values(root), sharded(values(), owners, placement)  # draws are those of the first owner
            shards = divided.shards
            seen, ours = VIEWS[view](whole), VIEWS[view](divided)
            assert isinstance(ours, ShardedTensor)
            assert (ours.shape, ours.stride(), ours.storage_offset()) == (
                seen.shape,
                seen.stride(),
                seen.storage_offset(),
            )
            write(seen)
            write(ours)
            assert torch.equal(full(divided), whole.cpu()), name
            assert all(a is b for a, b in zip(divided.shards, shards, strict=True))
            assert torch.equal(ours.full_tensor("cpu"), seen.cpu()), name
            torch.testing.assert_close(ours.sum().cpu(), seen.sum().cpu())

    on_owners(write_to_all)


def test_without_gathers_they_are_only_copied_and_overwritten(slots: list) -> None:
    """As initialisers do. Other operators change nothing."""
    for name, write in WRITES.items():
        divided = sharded(values(), slots)
        view = divided[1:5]
        if name in ONLY_COPIES:
            write(view)
            assert torch.equal(full(divided)[0], values()[0])
            assert not torch.equal(full(divided)[1:5], values()[1:5])
            assert torch.equal(view.cpu().full_tensor(), full(divided)[1:5])
            assert view[0, 0].item() == full(divided)[1, 0].item()
        else:
            with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
                write(view)
            assert torch.equal(full(divided), values())


def test_a_write_is_seen_by_the_versions_of_the_tensor_and_its_shards(slots: list) -> None:
    """Units see by these that values have changed."""
    divided = sharded(values(), slots)
    before = divided.shards[0]._version, divided._version
    divided[2:4].zero_()
    assert divided.shards[0]._version > before[0]
    assert divided._version > before[1]


def test_they_keep_the_memory_that_they_were_made_of(slots: list) -> None:
    """Also if the tensor gets other shards, or another shape."""
    for change in (
        lambda x: x.__setattr__("data", sharded(values() * 2, slots) if isinstance(x, ShardedTensor) else values() * 2),
        lambda x: x.t_(),
    ):
        whole, divided = values(), sharded(values(), slots)
        for x in (whole, divided):
            view = x[2:4]
            change(x)
            assert torch.equal(full(view), values()[2:4])
            view.zero_()
        assert torch.equal(full(divided), whole)


@pytest.mark.usefixtures("gathers")
def test_views_of_one_tensor_are_written_together(slots: list) -> None:
    whole, divided = values(slots[0]), sharded(values(), slots)
    for x in (whole, divided):
        found, inverse = torch.zeros(1, device=slots[0]), torch.full((1,), 2.0, device=slots[0])
        torch._amp_foreach_non_finite_check_and_unscale_([x[0], x[1:3], x.data[4]], found, inverse)
        assert torch.add(x.detach(), x[3:4].clone(), out=x) is x
    assert torch.equal(full(divided), whole.cpu())


def test_they_have_no_shards_of_their_own(slots: list) -> None:
    divided = sharded(values(), slots)
    view = divided[2:4]
    for name in ("shards", "placement"):
        with pytest.raises(NotImplementedError, match=r"ShardedView\(shape=\(2, 4\).*has no shards.*full_tensor\(\)"):
            getattr(view, name)
    copied = copy.deepcopy([view, view])
    assert copied[0] is copied[1]
    view.zero_()
    assert torch.equal(full(copied[0]), values()[2:4])
    assert isinstance(view.new_zeros(2, 4), ShardedTensor)
    assert not full(torch.randn_like(divided).copy_(divided)[2:4]).any()


@pytest.mark.usefixtures("gathers")
def test_gradients_of_views_are_divided(slots: list) -> None:
    parameter = nn.Parameter(sharded(values(), slots))
    parameter.T.backward(values().T.to(slots[0]))
    assert isinstance(parameter.grad, ShardedTensor)
    assert parameter.grad.placement == parameter.placement
    (parameter[2:4] * 3).sum().backward()
    expected = values()
    expected[2:4] += 3
    assert torch.equal(full(parameter.grad), expected)


def test_items_are_assigned(slots: list) -> None:
    whole, divided = values(), sharded(values(), slots)
    for x in (whole, divided):
        x[0:3] = x[4:7]
        x[6] = x[0]
        x[2] = 5
        x[-3:-1, 0] = torch.tensor([1.0, 2.0], dtype=x.dtype)
        x[..., 3] = -1
    assert torch.equal(full(divided), whole)
    with pytest.raises(IndexError):
        divided[7]


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
