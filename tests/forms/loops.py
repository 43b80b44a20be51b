"""Runs one training loop with replicated modules and with plain ones, and compares the results."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel.composable import replicate
from dataparallel.testing.steps import assert_equal, detached

SMALL = {"first_bucket_mb": 64 / 2**20, "bucket_cap_mb": 600 / 2**20}
"""Sizes of buckets that hold a few parameters of the tests' small models."""


def assert_same_loop(loop: Callable[..., Any], slots: Sequence[Any], *builds: Callable[[], nn.Module]) -> None:
    """Asserts that ``loop``, called with a module for each builder, leaves replicated ones as it leaves plain ones.

    Compared are what the loop returns, the state dicts, and the gradients that are there at its end.
    """
    both = []
    for has_form in (True, False):
        modules = [build().to(torch.device(slots[0])) for build in builds]
        for module in modules if has_form else ():
            replicate(module, devices=slots, **SMALL)
        returned = loop(*modules)
        both.append([detached(returned), [left_behind(module) for module in modules]])
    assert_equal(*both, "loop", atol=1e-9)


def left_behind(module: nn.Module) -> list[Any]:
    """The module's values and gradients."""
    return [detached(module.state_dict()), {name: detached(each.grad) for name, each in module.named_parameters()}]


def waits(module: nn.Module) -> AbstractContextManager[Any]:
    """``no_sync()`` of a composable form. For a plain module, which keeps no gradients on slots, it does nothing."""
    return module.no_sync() if hasattr(module, "no_sync") else nullcontext()


def mean_square(output: Tensor) -> Tensor:
    """A loss."""
    return output.square().mean()


def in_place(module: nn.Module, slots: Sequence[Any], dim: int = 0) -> nn.Module:
    """`replicate`, called as a wrapper is: the ``wrap`` of ``dataparallel.testing.parity``."""
    return replicate(module, devices=slots, dim=dim)


def wait_for_the_engine(slots: Sequence[Any]) -> None:
    """The limits ask for this after a backward that has failed: the engine's other threads may be in a node of it.

    Each takes the nodes of its device one after the other, so it has left that node when it has run these.
    """
    for slot in {*map(torch.device, slots)}:
        torch.ones(1, device=slot, requires_grad=True).sum().backward()
    if torch.device(slots[0]).type != "cpu":  # nothing orders what they have launched
        torch.accelerator.synchronize(torch.device(slots[0]))
