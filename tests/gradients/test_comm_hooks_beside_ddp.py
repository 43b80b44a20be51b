"""torch's own communication hooks, beside the same hooks under DistributedDataParallel: the same gradients."""

from __future__ import annotations

import pytest
import torch

from beside_ddp_hooks import HOOKS, assert_beside_ddp, batch, build, hook_of
from dataparallel.composable import replicate
from machine_ranks import on_machines

FEW_KB = 1500 / 2**20
"""A size of buckets in MiB: the model has two of them."""


def skip_where_torch_fails(name: str) -> None:
    """A group of gloo has buffers in host memory, and torch's PowerSGD synchronises them as if they were CUDA's."""
    if "powerSGD" in name and torch.cuda.is_available():
        pytest.skip("torch's PowerSGD fails for buffers in host memory where there is CUDA")


def over_the_group(rank: int, devices: list[torch.device], name: str, cap_mb: float = 100.0) -> None:
    assert_beside_ddp(rank, devices, name, cap_mb, process_group=torch.distributed.group.WORLD)


def by_the_hook_alone(rank: int, devices: list[torch.device], name: str) -> None:
    assert_beside_ddp(rank, devices, name)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("slots", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_hook_leaves_the_gradients_that_it_leaves_under_ddp(name: str, slots: int) -> None:
    """After the rounding of a hook too: what it is given agrees to the rounding of float64."""
    skip_where_torch_fails(name)
    on_machines(over_the_group, name, slots=slots)


@pytest.mark.parametrize("name", ["allreduce", "fp16_compress", "bf16_compress_wrapper", "noop"])
def test_in_several_buckets_too(name: str) -> None:
    """These hooks do to each number the same in any bucket."""
    on_machines(over_the_group, name, FEW_KB)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("name", ["allreduce", "fp16_compress_wrapper", "powerSGD", "post_localSGD"])
def test_where_only_the_hook_knows_the_group(name: str) -> None:
    """The module is replicated without machines. All copies begin with the same values here."""
    on_machines(by_the_hook_alone, name)


def powers_in_several_buckets(rank: int, devices: list[torch.device]) -> list[list[torch.Tensor]]:
    """The gradients of steps with PowerSGD and several buckets."""
    model = replicate(
        build().to(devices[0]),
        devices=devices,
        first_bucket_mb=FEW_KB,
        bucket_cap_mb=FEW_KB,
        process_group=torch.distributed.group.WORLD,
    )
    model.register_comm_hook(*hook_of("powerSGD"))
    steps = []
    for step in range(4):
        model.zero_grad()
        model(batch(rank, step).to(devices[0])).square().mean().backward()
        steps.append([each.grad.cpu().clone() for each in model.parameters()])
    return steps


def test_power_sgd_in_several_buckets_leaves_the_same_on_all_ranks() -> None:
    """Its collectives of two buckets would mix if the second began before the first has ended."""
    skip_where_torch_fails("powerSGD")
    first, second = on_machines(powers_in_several_buckets)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
