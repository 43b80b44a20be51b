"""Copies of sharded tensors: to devices, to dtypes, into each other and into plain tensors, alone and in modules."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from sharding import owners, places, same

PLACEMENTS = [Shard(0), Shard(1), Replicate()]


# Second objects, clones


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_clone_has_memory_of_its_own(placement: object, whole: Tensor, slots: list) -> None:
    tensor = distribute_tensor(whole, slots, placement)
    clone = tensor.clone()
    for shard in tensor.shards:
        shard.zero_()
    assert same(clone, whole)
    assert (clone.placement, clone.devices) == (placement, owners(slots))


# To other dtypes and devices


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_to_another_dtype(placement: object, whole: Tensor, slots: list) -> None:
    tensor = distribute_tensor(whole, slots, placement)
    assert same(tensor.half(), whole.half())
    assert same(tensor.to(torch.int64), whole.long())
    assert same(tensor.type(torch.float64), whole.double())
    assert tensor.to(torch.float32) is tensor
    assert same(tensor.to(torch.float32, copy=True), whole)
    assert places(tensor.half()) == tensor.half().devices == owners(slots)


@pytest.mark.devices("sim")
@pytest.mark.parametrize("back", ["sim", "first", "sim()"])
def test_to_the_cpu_and_back_to_the_owners(
    back: str, sharded: ShardedTensor, whole: Tensor, slots: list, root: torch.device
) -> None:
    there = sharded.cpu()
    assert places(there) == (torch.device("cpu"),) * 3
    assert there.devices == owners(slots)
    assert same(there, whole)
    assert there.full_tensor().device.type == "cpu"
    again = there.sim() if back == "sim()" else there.to("sim" if back == "sim" else root)
    assert places(again) == again.devices == owners(slots)
    assert same(again, whole)
    both = there.to(root, torch.float64)
    assert places(both) == owners(slots)
    assert same(both, whole.double())


@pytest.mark.devices("sim")
def test_places_that_owners_cannot_move_to(whole: Tensor) -> None:
    """One device that is not meant for all, an accelerator for CPU owners, owners that the machine lacks."""
    on_devices, on_cpu = distribute_tensor(whole, ["sim:0", "sim:1"]), distribute_tensor(whole, ["cpu", "cpu"])
    far = ShardedTensor(on_cpu.shards, Shard(0), whole.shape, [torch.device("sim", index) for index in (0, 63)])
    assert same(far, whole)
    for tensor, place, message in (
        (on_devices, "sim:4", r"owners sim:0, sim:1 cannot be moved to 'sim:4'.*full_tensor"),
        (on_devices.cpu(), "sim:4", r"owners sim:0, sim:1 cannot be moved to 'sim:4'.*full_tensor"),
        (on_cpu, "sim:0", "owners cpu, cpu cannot be moved to 'sim:0'"),
        (far, "sim:0", "'sim:63' does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor.to(place)


def test_from_meta(sharded: ShardedTensor, root: torch.device, slots: list) -> None:
    meta = sharded.to("meta")
    assert meta.is_meta
    assert meta.devices == owners(slots)
    with pytest.raises(NotImplementedError, match="no data"):
        meta.to(root)
    empty = torch.empty_like(meta, device=root)
    assert places(empty) == owners(slots)
    assert [shard.shape for shard in empty.shards] == [shard.shape for shard in sharded.shards]


def test_empty_like(sharded: ShardedTensor, slots: list) -> None:
    for device, expected in ((None, owners(slots)), ("cpu", (torch.device("cpu"),) * 3)):
        empty = torch.empty_like(sharded, dtype=torch.int64, device=device)
        assert empty.dtype == torch.int64
        assert empty.devices == owners(slots)
        assert places(empty) == expected


# copy_


@given(st.data())
def test_copies_between_tensors_that_are_divided_in_any_way(
    make_slots: Callable[[int], list], data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    placements = st.one_of(st.just(Replicate()), st.integers(0, max(len(shape) - 1, 0)).map(Shard))
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64])
    whole = torch.randint(0, 9, shape).to(data.draw(dtypes))
    target = distribute_tensor(
        torch.full(shape, -1, dtype=data.draw(dtypes)), make_slots(data.draw(st.integers(1, 4))), data.draw(placements)
    )
    if data.draw(st.booleans()):
        source: Tensor = distribute_tensor(whole, make_slots(data.draw(st.integers(1, 4))), data.draw(placements))
    else:
        source = whole.to(data.draw(st.sampled_from(["cpu", *make_slots(3)])))
    shards = target.shards
    assert target.copy_(source, non_blocking=data.draw(st.booleans())) is target
    assert target.shards is shards
    if target.device.type != "cpu":
        torch.accelerator.synchronize()
    expected = whole.to(target.dtype)
    assert torch.equal(target.full_tensor("cpu"), expected)
    # Each owner of a replicated tensor has it.
    assert all(
        torch.equal(a.cpu(), b)
        for a, b in zip(
            shards, distribute_tensor(expected, ["cpu"] * len(shards), target.placement).shards, strict=True
        )
    )


def test_other_shapes_are_refused(sharded: ShardedTensor, whole: Tensor, slots: list) -> None:
    for target in (sharded, sharded.to("meta")):
        with pytest.raises(ValueError, match="the shapes differ"):
            target.copy_(distribute_tensor(whole[:6], slots))
        with pytest.raises(RuntimeError, match="must match"):
            target.copy_(whole[:6])
    assert same(sharded, whole)


def test_into_a_plain_tensor(sharded: ShardedTensor, whole: Tensor, root: torch.device) -> None:
    target = torch.zeros(7, 3, dtype=torch.float64, device=root)
    assert target.copy_(sharded) is target
    assert torch.equal(target.cpu(), whole.double())
    with pytest.raises(RuntimeError):
        target[:6].copy_(sharded)


# The host


@pytest.mark.slots(4)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_item(shape: tuple, placement: object, on_owners: Callable[[Callable], list]) -> None:
    def read(owners: Any) -> None:
        tensor = distribute_tensor(torch.full(shape, 3.5), owners, placement)
        assert tensor.item() == float(tensor) == 3.5
        assert bool(tensor)
        assert bool(tensor > 2)

    on_owners(read)


@pytest.mark.devices("sim", "cuda")
def test_pinned_memory(sharded: ShardedTensor, whole: Tensor, slots: list) -> None:
    there = sharded.cpu()
    assert not there.is_pinned()
    pinned = there.pin_memory()
    assert pinned.is_pinned()
    assert pinned.devices == owners(slots)
    assert same(pinned, whole)
    assert distribute_tensor(torch.ones(1), slots).cpu().pin_memory().is_pinned()


# Modules


class Tied(nn.Module):
    """A parameter under two names."""

    def __init__(self, whole: Tensor, slots: list) -> None:
        super().__init__()
        self.weight = self.other = nn.Parameter(distribute_tensor(whole, slots))


@pytest.fixture(params=[False, True], ids=["", "swap"])
def swaps(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swaps")
def test_a_module_loads_sharded_and_full_states(whole: Tensor, slots: list) -> None:
    module = Tied(whole, slots)
    weight, shards = module.weight, module.weight.shards
    full = {"weight": whole + 1, "other": whole + 1}
    for state, expected in (
        ({name: value.clone().zero_() for name, value in module.state_dict().items()}, whole * 0),
        (full, whole + 1),
        (Tied(whole * 3, slots[:2]).state_dict(), whole * 3),
    ):
        module.load_state_dict(state)
        assert module.weight is module.other is weight
        assert same(weight, expected)
        assert weight.devices == owners(slots)
        assert all(a is b for a, b in zip(weight.shards, shards, strict=True))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict(full | {"weight": whole[:6]})


def test_a_module_is_assigned_states(whole: Tensor, slots: list, swaps: bool) -> None:
    """A full one only where tensors are swapped: torch asks the tensor then, which divides what it is assigned."""
    module = Tied(whole, slots)
    states: list[Any] = [Tied(whole + 1, slots).state_dict()]
    if swaps:
        states.append({"weight": whole + 1, "other": whole + 1})
    for state in states:
        module.load_state_dict(state, assign=True)
        assert isinstance(module.weight, nn.Parameter)
        assert isinstance(module.weight, ShardedTensor)
        assert module.weight.requires_grad
        assert same(module.weight, whole + 1)
        assert places(module.weight) == owners(slots)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_complex_numbers_are_seen_as_pairs_on_the_same_memory(slots: list, placement: Shard | Replicate) -> None:
    whole = torch.randn(7, 3, dtype=torch.complex64)
    complex_numbers = distribute_tensor(whole, slots, placement)
    pairs = torch.view_as_real(complex_numbers)
    assert pairs.placement == placement
    assert same(pairs, torch.view_as_real(whole))
    assert same(torch.view_as_complex(pairs), whole)
    pairs.mul_(2)
    assert same(complex_numbers, whole * 2)


def test_pairs_that_are_cut_in_two_are_no_complex_numbers(slots: list) -> None:
    with pytest.raises(NotImplementedError, match=r"view_as_complex.*cut pairs in two"):
        torch.view_as_complex(distribute_tensor(torch.ones(3, 2), slots, Shard(1)))
    with pytest.raises(NotImplementedError, match=r"view_as_real.*cut pairs in two"):
        torch.view_as_real(distribute_tensor(torch.tensor(1j), slots))
