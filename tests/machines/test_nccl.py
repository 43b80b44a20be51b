"""NCCL over machines: few communicators, made at the start; one order of launches; no stream waits that need not.

Simulated devices stand in for CUDA devices, and `nccl_on_machines` for NCCL. It has not run on GPUs.
"""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from dataparallel.composable import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate
from machine_ranks import on_machines, said
from nccl_on_machines import has_circle, nccl_on_machines

pytestmark = pytest.mark.devices("sim")

STEPS = 3


class Late(nn.Linear):
    """Its backward takes another time in each call, on each machine and slot."""

    def forward(self, x: Tensor) -> Tensor:
        def delay(grad: Tensor) -> None:
            time.sleep(random.random() / 200)

        found = super().forward(x)
        found.register_hook(delay)
        return found


def mesh_of(ranks: int) -> Any:
    return init_device_mesh("cpu", (2, ranks // 2) if ranks == 4 else (ranks,), mesh_dim_names=("a", "b")[: ranks // 2])


def trains(rank: int, devices: list[torch.device], form: str) -> dict[str, Any]:
    random.seed(rank)
    torch.manual_seed(0)
    mesh = mesh_of(distributed.get_world_size())
    net: Any = nn.Sequential(*[Late(8, 8, dtype=torch.float64) for _ in range(5)]).to(devices[0])
    with nccl_on_machines() as nccl:
        if form == "replicate":
            net = replicate(net, devices=devices, mesh=mesh)
        else:
            for unit in (*net, net):
                fully_shard(unit, devices=devices, mesh=mesh)
        before = len(nccl.communicators)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.randn(4 * distributed.get_world_size(), 8, dtype=torch.float64)
        for _ in range(STEPS):
            chunk = x.chunk(distributed.get_world_size())[rank].to(devices[0])
            net(chunk).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in net.parameters()]
    return {
        "before": before,
        "communicators": [(ranks, device.index) for ranks, device in nccl.communicators],
        "issued": [(ranks, device.index, name) for ranks, device, name in nccl.issued],
        "parameters": found,
    }


def alone(ranks: int) -> list[Tensor]:
    """The parameters after the same steps of one device."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(8, 8, dtype=torch.float64) for _ in range(5)])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(4 * ranks, 8, dtype=torch.float64)
    for _ in range(STEPS):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def assert_one_order(of_ranks: list[dict[str, Any]]) -> None:
    """No rank issues two collectives of different groups in another order than another rank, nor is there a circle."""
    orders: dict[int, list[tuple[str, int]]] = {}
    for rank, found in enumerate(of_ranks):
        counts: dict[Any, int] = {}
        orders[rank] = []
        for ranks, device, name in found["issued"]:
            counts[ranks, device] = number = counts.get((ranks, device), 0) + 1
            orders[rank].append((f"{ranks} {device} {name}", number))
    assert not has_circle(orders)
    for rank, found in enumerate(of_ranks):  # what belongs together is the same on all its ranks
        for group in {ranks for ranks, _, _ in found["issued"]}:
            own = [[each for each in of_ranks[other]["issued"] if each[0] == group] for other in group]
            assert own == [own[0]] * len(own)
            assert rank in group


@pytest.mark.parametrize(
    ("form", "ranks", "communicators"),
    [
        ("replicate", 2, [((0, 1), 0)]),
        ("fully_shard", 2, [((0, 1), 0), ((0, 1), 1)]),
        ("fully_shard", 4, [((0, 1), 0), ((0, 1), 1), ((0, 2), 0), ((0, 2), 1), ((0, 1, 2, 3), 0)]),
    ],
)
def test_a_group_has_one_communicator_for_each_device_and_all_ranks_one_order(
    form: str, ranks: int, communicators: list[Any]
) -> None:
    found = on_machines(trains, form, ranks=ranks, timeout=120)
    assert found[0]["communicators"] == communicators
    for each in found:
        assert each["before"] == len(each["communicators"]) == len(communicators)
        for one, other in zip(each["parameters"], alone(ranks), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert_one_order(found)


def casts(rank: int, devices: list[torch.device]) -> None:
    """What is sent is a copy in another dtype, which is dropped when the result is taken."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(devices[0])
    with nccl_on_machines():
        for unit in (*net, net):
            policy = MixedPrecisionPolicy(torch.bfloat16)
            fully_shard(unit, devices=devices, mesh=mesh_of(2), mp_policy=policy)
        for _ in range(STEPS):
            net(torch.ones(4, 8, device=devices[0])).sum().backward()
        torch.sim.check_clocks()


def test_memory_of_what_is_sent_is_used_again_after_it_was_sent() -> None:
    on_machines(casts)


class OnOneMachine(nn.Module):
    """Uses its last layer on the machine of rank 1 only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.first, self.last = rank, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) if self.rank == 1 else self.first(x)


def leaves_out(rank: int, devices: list[torch.device]) -> None:
    """Gradients that a machine lacks are zeros of a side stream. What comes for them is used on the computing one."""
    net: Any = OnOneMachine(rank).to(devices[0])
    with nccl_on_machines():
        net = replicate(net, devices=devices, mesh=mesh_of(2), bucket_cap_mb=1e-9, first_bucket_mb=1e-9)
        for _ in range(STEPS):
            net(torch.ones(4, 8, device=devices[0])).sum().backward()
            for parameter in net.parameters():
                parameter.grad.mul_(2)
            net.zero_grad()
            torch.sim.check_clocks()


def test_sums_may_be_dropped_that_a_machine_had_no_gradients_for() -> None:
    on_machines(leaves_out)


# ---- host values go by gloo ------------------------------------------------------------------------------------------


def clips(rank: int, devices: list[torch.device], start: str) -> Tensor:
    torch.manual_seed(rank)
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double().to(start)
    with nccl_on_machines():
        for unit in (net[0], net):
            fully_shard(unit, devices=devices, mesh=mesh_of(2), offload_policy=CPUOffloadPolicy())
        net(torch.ones(4, 8, dtype=torch.float64, device=devices[0])).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        after = nn.utils.get_total_norm([parameter.grad for parameter in net.parameters()])
        assert after.item() == pytest.approx(1e-3)
        assert {shard.device.type for shard in net[0].weight.shards} == {"cpu"}
        return torch.stack([norm, net[0].weight.full_tensor().sum()])


@pytest.mark.parametrize("start", ["cpu", "sim:0"])
def test_shards_in_host_memory_go_by_gloo_where_the_group_has_nccl_alone(start: str) -> None:
    one, other = on_machines(clips, start)
    assert torch.equal(one, other)


# ---- ranks send from the same communicators --------------------------------------------------------------------------


def applies(rank: int, lists: list[list[torch.device]], has_nccl: bool, form: str) -> list[str]:
    """What each list of slots leads to, one after the other."""
    found = []
    with nccl_on_machines() if has_nccl else nullcontext():
        for devices in lists:
            net: Any = nn.Linear(8, 8).to(devices[0])
            if form == "replicate":
                found.append(said(partial(replicate, net, devices=devices, mesh=mesh_of(2))))
            else:
                found.append(said(partial(fully_shard, net, devices=devices, mesh=mesh_of(2))))
            is_unchanged = type(net) is nn.Linear
            assert is_unchanged == found[-1].startswith("MachinesDiffer")
            if not is_unchanged:
                net(torch.ones(6, 8, device=devices[0])).sum().backward()
    return found


def patterns(rank: int, devices: list[torch.device], has_nccl: bool, form: str) -> list[str]:
    a, b = devices
    lists = [[a, a, b], [b, a, a]] if rank == 0 else [[a, b, b], [a, b, b]]
    return applies(rank, lists, has_nccl, form)


@pytest.mark.parametrize("has_nccl", [True, False])
def test_slots_that_repeat_devices_in_another_pattern_are_refused_on_all_machines(has_nccl: bool) -> None:
    for differ, agree in on_machines(patterns, has_nccl, "fully_shard"):
        assert "from sim 0, sim 0, sim 1" in differ.partition("on rank 0")[0]
        assert "from sim 0, sim 1, sim 1" in differ.partition("on rank 0")[2]
        assert agree == "nothing was raised"  # the indices need not agree


def test_replicas_may_share_devices_in_any_pattern() -> None:
    """Their gradients go to other machines from the first slot's device."""
    for same, _ in on_machines(patterns, True, "replicate"):
        assert same == "nothing was raised"


def orders(rank: int, devices: list[torch.device], form: str) -> list[str]:
    return applies(rank, [devices, devices if rank == 0 else devices[::-1], devices[::-1]], True, form)


@pytest.mark.parametrize("form", ["replicate", "fully_shard"])
def test_devices_that_other_ranks_have_no_communicator_with_are_refused_on_all_machines(form: str) -> None:
    for first, crossed, swapped in on_machines(orders, form):
        assert (first, swapped) == ("nothing was raised", "nothing was raised")
        assert "sim 0" in crossed
        assert "sim 1" in crossed
        assert "on rank 1" in crossed
