"""What a sharded tensor over machines is: parts here, the whole everywhere that asks, copies, refusals."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.sharded.placements import Owners, over_of, shard_shapes
from fake_machines import FakeOver, OutOfStep, on_fake_machines, owners_of
from sharding import full

pytestmark = pytest.mark.slots(4)

SHAPES = [(7, 3), (8, 2), (3, 5), (1,), (), (0, 3), (4, 9, 2)]
PLACEMENTS = [Shard(0), Shard(-1), Replicate()]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def same(tensor: Tensor, expected: Tensor, places: tuple[torch.device, ...]) -> bool:
    """True if it is sharded over these owners with this whole, which every machine gets."""
    assert type(tensor) in (ShardedTensor, nn.Parameter)
    assert isinstance(tensor, ShardedTensor)
    assert tensor.devices == places
    return torch.equal(full(tensor), expected) and torch.equal(tensor.full_tensor("cpu"), expected)


# Owners


def test_owners_are_equal_if_devices_and_machines_are(slots: list) -> None:
    devices = tuple(torch.device(slot) for slot in slots)

    def compare(over: FakeOver) -> None:
        owners = Owners(devices, over)
        assert {owners: "found"}[Owners(devices, over)] == "found"
        for other in (devices, Owners(devices, FakeOver(over.machines, over.rank)), Owners(devices[:2], over)):
            assert owners != other
        assert (over_of(owners), over_of(devices)) == (over, None)
        assert f"of machine {over.rank} of 2" in repr(distribute_tensor(values((7, 3)), owners))

    on_fake_machines(compare)


# Parts and wholes


@pytest.mark.parametrize("machines", [2, 4])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_machines_have_parts_in_turn(slots: list, shape: tuple, placement: Any, machines: int) -> None:
    whole = values(shape)

    def divide(over: FakeOver) -> None:
        owners = owners_of(slots, over)
        tensor = distribute_tensor(whole, owners, placement)
        shapes = shard_shapes(shape, tensor.placement, len(slots))
        assert [shard.shape for shard in tensor.shards] == shapes[over.rank :: over.size]
        assert tensor.over is over
        assert [shard.device for shard in tensor.shards] == [*owners]
        assert same(tensor, whole, owners)

    on_fake_machines(divide, machines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int16, torch.complex128])
def test_the_whole_has_every_dtype_and_comes_in_pieces(slots: list, root: torch.device, dtype: torch.dtype) -> None:
    whole = values((9, 3), dtype)

    def join(over: FakeOver) -> None:
        for placement in (Shard(0), Shard(1)):
            tensor = distribute_tensor(whole, owners_of(slots, over), placement)
            before = len(over.machines.calls)
            joined = tensor.full_tensor(root)
            assert len(over.machines.calls) - before == 2
            assert joined.device == root
            assert torch.equal(joined.cpu(), whole)

    on_fake_machines(join)


def test_one_that_is_on_meta_stays_there(slots: list) -> None:
    def divide(over: FakeOver) -> None:
        owners = owners_of(slots, over)
        tensor = distribute_tensor(torch.empty(7, 3, device="meta"), owners)
        assert tensor.full_tensor().is_meta
        assert tensor.sum().is_meta
        assert torch._foreach_norm([tensor])[0].is_meta
        assert torch.empty_like(tensor, device=owners[0]).devices == owners
        assert over.machines.calls == []

    on_fake_machines(divide)


# From one division to another


@pytest.mark.parametrize("to", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("of", [Shard(0), Shard(1), Replicate()], ids=str)
def test_it_is_divided_anew(slots: list, of: Any, to: Any) -> None:
    """Between placements, other owners on the same machines, other machines, and one machine."""
    whole = values((7, 5))

    def divide(over: FakeOver) -> None:
        owners = owners_of(slots, over)
        all_here = tuple(torch.device(slot) for slot in slots)
        others = Owners(owners[:1], over), Owners(owners, FakeOver(over.machines, over.rank)), all_here
        for start, end in [(owners, owners), *((owners, other) for other in others), *((o, owners) for o in others)]:
            tensor = distribute_tensor(whole, start, of)
            again = distribute_tensor(tensor, end, to)
            assert same(again, whole, end)
            with torch.no_grad():
                again.copy_(tensor * 2)
            assert same(again, whole * 2, end)

    on_fake_machines(divide)


# Gradients, parameters


def test_gradients_and_data_are_divided_over_the_same_machines(slots: list) -> None:
    whole = values((7, 3))

    def check(over: FakeOver) -> None:
        owners = owners_of(slots, over)
        parameter = nn.Parameter(distribute_tensor(whole, owners))
        (parameter * 2).sum().backward()
        assert same(parameter.grad, torch.full((7, 3), 2.0), owners)
        (parameter * parameter).sum().backward()
        assert same(parameter.grad, 2 + 2 * whole, owners)
        parameter.data = distribute_tensor(whole + 1, owners)
        assert same(parameter.data, whole + 1, owners)
        here = distribute_tensor(whole, tuple(owners))
        for name in ("grad", "data"):
            with pytest.raises(ValueError, match=r"must be sharded as it is; got .* of machine . of 2"):
                setattr(parameter, name, distribute_tensor(whole, Owners(owners, FakeOver(over.machines, over.rank))))
            with pytest.raises(ValueError, match=r"distribute_tensor\(tensor, Owners\(.* of machine . of 2"):
                setattr(parameter, name, here)
        with pytest.raises(ValueError, match="different owners"):
            _ = parameter + here

    on_fake_machines(check)


@pytest.mark.parametrize("write", [pickle.dumps, lambda tensor: torch.save(tensor, io.BytesIO()), copy.copy])
def test_it_is_not_pickled(slots: list, write: Callable[[Any], Any]) -> None:
    def check(over: FakeOver) -> None:
        parameter = nn.Parameter(distribute_tensor(values((7, 3)), owners_of(slots, over)))
        with pytest.raises(TypeError, match=r"cannot be pickled: .*full_state_dict\(model\).*full_tensor\(\)"):
            write({"weight": parameter} if write is not copy.copy else parameter)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(parameter.devices)

    on_fake_machines(check)


# The machines of these tests


def test_machines_that_are_out_of_step_are_told() -> None:
    def other_calls(over: FakeOver) -> None:
        over.all_gather(torch.zeros(2 + over.rank))

    def one_call(over: FakeOver) -> None:
        if over.rank:
            over.all_gather(torch.zeros(2))

    for function in (other_calls, one_call):
        with pytest.raises(OutOfStep):
            on_fake_machines(function)
