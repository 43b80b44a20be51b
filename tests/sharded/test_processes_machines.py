"""Sharded tensors over processes: what tests with machines in threads promise, with real collectives."""

import pytest
import torch

from dataparallel.machines.errors import MachinesDiffer
from dataparallel.sharded import Replicate, Shard, ShardedTensor, distribute_tensor
from dataparallel.sharded.placements import Owners
from machine_ranks import all_machines, on_machines
from sharded_parameters import PLACEMENTS

DTYPES = [torch.float64, torch.bfloat16, torch.bool, torch.int16, torch.complex64]


def owners_here(devices: list) -> Owners:
    return Owners(devices, all_machines())


def divided(tensors: list, owners: Owners) -> list[ShardedTensor]:
    return [
        distribute_tensor(tensor.detach(), owners, placement)
        for tensor, placement in zip(tensors, PLACEMENTS, strict=True)
    ]


def computes(rank: int, devices: list) -> None:
    owners = owners_here(devices)
    whole = torch.arange(21.0).reshape(7, 3)
    for placement in (Shard(0), Shard(1), Replicate()):
        for dtype in DTYPES:
            tensor = distribute_tensor(whole.to(dtype), owners, placement)
            assert torch.equal(tensor.full_tensor("cpu"), whole.to(dtype))
            assert tensor.full_tensor().device == devices[0]
        tensor = distribute_tensor(whole, owners, placement)
        assert tensor.sum().item() == whole.sum().item()
        assert (tensor * 2).amax().item() == 40
        assert torch.equal(tensor, tensor.clone())
        assert not torch.equal(tensor, tensor + (tensor > 19))
        assert torch.equal(distribute_tensor(tensor, owners, Shard(0)).full_tensor("cpu"), whole)
        torch.manual_seed(3 + rank)  # that of the first counts
        if devices[0].type != "cpu":
            torch.get_device_module(devices[0]).manual_seed_all(3 + rank)
        drawn = tensor.normal_().full_tensor("cpu")
        torch.manual_seed(3)
        if devices[0].type != "cpu":
            torch.get_device_module(devices[0]).manual_seed_all(3)
        assert torch.equal(drawn, torch.empty(7, 3, device=devices[0]).normal_().cpu())
    number = distribute_tensor(torch.tensor(2.5), owners)
    assert number.item() == 2.5
    assert (distribute_tensor(whole, owners) * number).sum().item() == 2.5 * whole.sum().item()


@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (3, 1)])
def test_values_reductions_and_draws(ranks: int, each: int) -> None:
    on_machines(computes, ranks=ranks, slots=each)


def differs(rank: int, devices: list) -> str:
    """Ranks call different operators. Those that follow work."""
    owners = owners_here(devices)
    tensor = distribute_tensor(torch.ones(7, 3), owners)
    with pytest.raises(MachinesDiffer) as raised:
        _ = tensor.sum() if rank == 0 else tensor.full_tensor("cpu")
    assert tensor.sum().item() == 21
    return str(raised.value)


def test_different_operators_are_an_error_on_all_ranks() -> None:
    first, second = on_machines(differs)
    assert first == second
    assert "an operator on sharded tensors" in first
