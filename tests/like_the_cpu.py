"""What tests of simulated devices share: the same function on the CPU to compare with, and the launches of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# Not "sim": torch does not know that name before `simulate`, and these tests are collected without it too.
DEVICE = torch.device("privateuseone", 1)
OTHER = torch.device("privateuseone", 2)


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def made(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A module with the same weights every time, in double precision on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args, **kwargs).double()


def outcome(function: Callable[..., Any], inputs: tuple[Any, ...], device: torch.device | str) -> list[Any]:
    """What the function returns, and its inputs' gradients and buffers after a backward, all moved to the CPU."""
    leaves = [fresh(value, device) for value in inputs]
    torch.manual_seed(1)
    outputs = [leaf for leaf in tree_leaves(function(*leaves)) if isinstance(leaf, Tensor)]
    assert all(output.device == torch.device(device) for output in outputs), [output.device for output in outputs]
    wanted = [output for output in outputs if output.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [cotangent(output) for output in wanted])
    gradients = [leaf.grad for value in leaves for leaf in tensors(value) if leaf.requires_grad]
    buffers = [buffer for leaf in leaves if isinstance(leaf, nn.Module) for buffer in leaf.buffers()]
    return tree_map(to_cpu, [*outputs, *gradients, *buffers])


def assert_as_on_the_cpu(
    function: Callable[..., Any], *inputs: Any, device: torch.device = DEVICE, **options: Any
) -> None:
    """Fails unless the function and its backward return the same on the device as on the CPU."""
    torch.testing.assert_close(
        outcome(function, inputs, device), outcome(function, inputs, "cpu"), equal_nan=True, **options
    )


def fresh(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, nn.Module):
        with torch.no_grad():
            return copy.deepcopy(value).to(device)
    return value


def tensors(value: Any) -> list[Tensor]:
    return list(value.parameters()) if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else []


def cotangent(output: Tensor) -> Tensor:
    """The same numbers in every dtype."""
    dtype = torch.complex128 if output.is_complex() else torch.float64
    return torch.randn(output.shape, dtype=dtype, generator=torch.Generator().manual_seed(2)).to(output)


def launches_of(function: Callable[..., Any], *arguments: Any) -> dict[int, int]:
    """The launches of a call by the index of their device, for devices that have any."""
    with torch.sim.counted() as counts:
        function(*arguments)
    return {device: count for device, count in enumerate(counts.launches) if count}


def to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
