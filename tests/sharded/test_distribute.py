"""`distribute_tensor`: a plain tensor becomes a sharded one, and `full_tensor` brings it back."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from clocked import timeline
from dataparallel import comm
from dataparallel.sharded import Replicate, Shard, distribute_tensor

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]

HOST = -1  # in a recording


def placements(dims: int) -> st.SearchStrategy:
    return st.one_of(st.just(Replicate()), st.integers(0, max(dims - 1, 0)).map(Shard))


def chunks(shape: Sequence[int], placement: Any, count: int) -> list[torch.Size]:
    """Those of ``torch.chunk``. Where it makes fewer than asked for, the last ones are empty."""
    if isinstance(placement, Replicate):
        return [torch.Size(shape)] * count
    if not shape:  # the first device owns a 0-dim tensor
        return [torch.Size(shape), *[torch.Size([0])] * (count - 1)]
    found = [chunk.shape for chunk in torch.empty(shape).chunk(count, placement.dim)]
    empty = torch.Size(0 if dim == placement.dim else size for dim, size in enumerate(shape))
    return found + [empty] * (count - len(found))


def numbers(shape: list[int], dtype: torch.dtype, device: object) -> Tensor:
    return torch.randint(0, 9, shape).to(dtype).to(device)


@given(st.data())
def test_there_and_back(make_slots: Callable[[int], list], data: st.DataObject) -> None:
    slots = make_slots(data.draw(st.integers(1, 5)))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    place = data.draw(st.sampled_from(["cpu", *slots]))
    tensor = numbers(shape, data.draw(st.sampled_from(DTYPES)), place)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    placement = data.draw(placements(len(shape)))
    sharded = distribute_tensor(tensor, slots, placement)
    assert (sharded.shape, sharded.dtype) == (tensor.shape, tensor.dtype)
    assert [shard.shape for shard in sharded.shards] == chunks(tensor.shape, placement, len(slots))
    assert [shard.device for shard in sharded.shards] == [*sharded.devices] == [torch.device(slot) for slot in slots]
    assert sharded.placement == placement
    assert sharded.is_leaf
    for device in ("cpu", slots[-1], None):
        full = sharded.full_tensor(device)
        assert type(full) is Tensor
        assert full.device == torch.device(slots[0] if device is None else device)
        assert full.dtype == tensor.dtype
        assert torch.equal(full.cpu(), tensor.cpu())


@given(st.data())
def test_a_sharded_tensor_is_divided_anew(make_slots: Callable[[int], list], data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    tensor = numbers(shape, torch.float32, "cpu")
    before = distribute_tensor(tensor, make_slots(data.draw(st.integers(1, 4))), data.draw(placements(len(shape))))
    slots = make_slots(data.draw(st.integers(1, 4)))
    placement = data.draw(placements(len(shape)))
    after = distribute_tensor(before, slots, placement)
    assert [shard.shape for shard in after.shards] == chunks(shape, placement, len(slots))
    for shard, expected in zip(after.shards, distribute_tensor(tensor, slots, placement).shards, strict=True):
        assert shard.device == expected.device
        assert torch.equal(shard, expected)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.slots(1, 3)
def test_no_memory_is_shared(slots: list, root: torch.device, placement: object) -> None:
    """Neither with the tensor that is divided, nor between parts, nor with the whole."""
    tensor = torch.ones(6, 3, device=root)
    sharded = distribute_tensor(tensor, slots, placement)
    full = sharded.full_tensor()
    storages = [each.untyped_storage().data_ptr() for each in (tensor, full, *sharded.shards)]
    assert len({*storages}) == len(storages)
    assert all(shard.is_contiguous() for shard in sharded.shards)
    assert all(shard.untyped_storage().nbytes() == shard.nbytes for shard in sharded.shards)


def test_gradients_are_wanted_where_they_were(slots: list) -> None:
    parameter = nn.Parameter(torch.ones(4))
    assert distribute_tensor(parameter, slots).requires_grad
    assert distribute_tensor(parameter * 2, slots).is_leaf
    assert not distribute_tensor(parameter, slots, requires_grad=False).requires_grad
    assert not distribute_tensor(torch.ones(4), slots).requires_grad
    assert distribute_tensor(torch.ones(4), slots, requires_grad=True).requires_grad
    assert not any(shard.requires_grad for shard in distribute_tensor(parameter, slots).shards)


def test_views_of_conjugates_are_resolved(slots: list, root: torch.device) -> None:
    tensor = torch.randn(4, 2, dtype=torch.complex64).to(root).conj()
    sharded = distribute_tensor(tensor, slots)
    assert not any(shard.is_conj() for shard in sharded.shards)
    assert torch.equal(sharded.full_tensor().cpu(), tensor.cpu().resolve_conj())


@pytest.mark.devices("sim", "stand-in")
@pytest.mark.apart
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_accelerators_exchange_as_the_library_is_told(placement: object, slots: list) -> None:
    """Through the host, where copies between two accelerators are broken."""
    with comm.using(transport="host"), timeline() as recorded:
        sharded = distribute_tensor(torch.ones(6, 3, device=slots[0]), slots, placement)
        sharded.full_tensor(slots[1])
        distribute_tensor(sharded, [*reversed(slots)], Shard(0))
    copies = [launch.copy for launch in recorded.recording.launches if launch.copy is not None]
    assert copies
    assert all(HOST in copy or copy[0] == copy[1] for copy in copies)


class Own(Tensor):
    """A subclass that the library does not know."""


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ([1.0, 2.0], "expects a tensor; got list"),
        (torch.ones(3).as_subclass(Own), "got one of the class Own"),
        (torch.eye(3).to_sparse(), r"got one that is torch.sparse_coo.*to_dense\(\)"),
        (nn.LazyLinear(3).weight, "uninitialised lazy parameter"),
    ],
)
def test_other_tensors_are_refused(tensor: object, message: str, slots: list) -> None:
    with pytest.raises(TypeError, match=message):
        distribute_tensor(tensor, slots)


def test_wrong_devices_and_placements_are_refused(slots: list) -> None:
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match="list of devices is empty"):
        distribute_tensor(tensor, [])
    with pytest.raises(TypeError, match="expected a list of devices"):
        distribute_tensor(tensor, "cpu")
    with pytest.raises(ValueError, match="no such dimension"):
        distribute_tensor(tensor, slots, Shard(1))
    assert distribute_tensor(torch.ones(3, 2), slots, Shard(-1)).placement == Shard(1)
    with pytest.raises(TypeError, match="a placement is"):
        distribute_tensor(tensor, slots, 0)
    with pytest.raises(ValueError, match="no device"):
        distribute_tensor(tensor, slots).full_tensor("nowhere")
