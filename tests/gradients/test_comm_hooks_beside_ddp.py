"""torch's own communication hooks, beside the same hooks under DistributedDataParallel: the same gradients.

Models compute in float64, so that gradients before a hook agree to 1e-14, and what a hook rounds is rounded alike on
both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

from dataparallel.composable import replicate
from machine_ranks import on_machines

STEPS = 5


def build() -> nn.Sequential:
    """The last layer has the larger matrix: buckets here begin with rounder sizes, those of DDP with the last layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()).double()


def batch(rank: int, step: int) -> Tensor:
    """That of a rank, of uneven size."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5 + rank, 8, dtype=torch.float64, generator=generator)


def hook_of(name: str) -> tuple[Any, Callable[..., Any]]:
    """A new state and torch's hook, for all ranks."""

    def powers(rank: int = 1, **options: Any) -> Any:
        return power.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1, **options)

    world = dist.group.WORLD
    match name:
        case "allreduce" | "fp16_compress" | "bf16_compress":
            return world, getattr(default_hooks, f"{name}_hook")
        case "fp16_compress_wrapper" | "bf16_compress_wrapper":
            return world, getattr(default_hooks, name)(default_hooks.allreduce_hook)
        case "powerSGD":
            return powers(), power.powerSGD_hook
        case "powerSGD of rank 3":
            return powers(3, warm_start=False, batch_tensors_with_same_shape=True), power.powerSGD_hook
        case "fp16_compress_wrapper of powerSGD":
            return powers(), default_hooks.fp16_compress_wrapper(power.powerSGD_hook)
        case "batched_powerSGD":
            return powers(), power.batched_powerSGD_hook
        case "post_localSGD":
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            state = post_localSGD_hook.PostLocalSGDState(None, groups[dist.get_rank()], start_localSGD_iter=2)
            return state, post_localSGD_hook.post_localSGD_hook
        case "noop":
            return None, debugging_hooks.noop_hook
    raise ValueError(name)


HOOKS = (
    "allreduce",
    "fp16_compress",
    "bf16_compress",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
    "powerSGD",
    "powerSGD of rank 3",
    "fp16_compress_wrapper of powerSGD",
    "post_localSGD",
    "noop",
)
"""For `hook_of`. ``batched_powerSGD`` is tested by itself: in the torches of today it fails under DDP too."""


@dataclass
class Steps:
    """The gradients after each step, and the parameters at the end."""

    gradients: list[list[Tensor]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


def steps_of(model: nn.Module, parameters: Sequence[Tensor], rank: int, device: torch.device) -> Steps:
    """Steps of SGD with momentum on a rank's batches."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    steps = Steps()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step).to(device)).square().mean().backward()
        steps.gradients.append([each.grad.cpu().clone() for each in parameters if each.grad is not None])
        optimizer.step()
    steps.parameters = [each.detach().cpu().clone() for each in parameters]
    return steps


def of_ddp(rank: int, name: str, cap_mb: float) -> Steps:
    """Those of DistributedDataParallel on the CPU."""
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    state, hook = hook_of(name)

    # DDP refuses bf16 by the names of hooks where there is no NCCL, although gloo sends it. So it gets another name.
    wrapped.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    return steps_of(wrapped, [*model.parameters()], rank, torch.device("cpu"))


def of_replicate(rank: int, name: str, devices: Sequence[torch.device], cap_mb: float, **options: Any) -> Steps:
    """Those of `replicate` on the slots."""
    model = replicate(build().to(devices[0]), devices=devices, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb, **options)
    model.register_comm_hook(*hook_of(name))
    return steps_of(model, [*model.parameters()], rank, devices[0])


def assert_beside_ddp(
    rank: int, devices: Sequence[torch.device], name: str, cap_mb: float = 100.0, **options: Any
) -> None:
    """Asserts that the same hook leaves the same gradients in each step, and the same parameters at the end."""
    found = of_replicate(rank, name, devices, cap_mb, **options)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return  # the constructor of DDP ends with SIGSEGV there, on gloo in torch 2.13
    expected = of_ddp(rank, name, cap_mb)
    for step, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, step=step: f"step {step}: {text}")
    for a, b in zip(found.parameters, expected.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


FEW_KB = 1500 / 2**20
"""A size of buckets in MiB: the model has two of them."""


def skip_where_torch_fails(name: str) -> None:
    """A group of gloo has buffers in host memory, and torch's PowerSGD synchronises them as if they were CUDA's."""
    if "powerSGD" in name and torch.cuda.is_available():
        pytest.skip("torch's PowerSGD fails for buffers in host memory where there is CUDA")


def over_the_group(rank: int, devices: list[torch.device], name: str, cap_mb: float = 100.0) -> None:
    assert_beside_ddp(rank, devices, name, cap_mb, process_group=dist.group.WORLD)


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


def powers_in_several_buckets(rank: int, devices: list[torch.device]) -> list[list[Tensor]]:
    """The gradients of steps with PowerSGD and several buckets."""
    model = replicate(
        build().to(devices[0]),
        devices=devices,
        first_bucket_mb=FEW_KB,
        bucket_cap_mb=FEW_KB,
        process_group=dist.group.WORLD,
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
