"""Runs one training loop with modules in a composable form and with plain ones, and compares the results."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dataparallel.composable import fully_shard, replicate
from dataparallel.testing.steps import assert_equal, detached
from each_form import whole

SMALL = {"first_bucket_mb": 64 / 2**20, "bucket_cap_mb": 600 / 2**20}
"""Sizes of buckets that hold a few parameters of the tests' small models."""


def assert_same_loop(
    loop: Callable[..., Any], slots: Sequence[Any], *builds: Callable[[], nn.Module], form: str = "replicate"
) -> None:
    """Asserts that ``loop``, called with a module for each builder, leaves those of a form as it leaves plain ones.

    Compared are what the loop returns, the state dicts, and the gradients that are there at its end.
    """
    both = []
    for has_form in (True, False):
        modules = [build().to(torch.device(slots[0])) for build in builds]
        if has_form:
            modules = [FORMS[form](module, slots) for module in modules]
        returned = loop(*modules)
        both.append([detached(tree_map(whole, returned)), [left_behind(module) for module in modules]])
    assert_equal(*both, "loop", atol=1e-9)


def in_small_buckets(module: nn.Module, slots: Sequence[Any]) -> nn.Module:
    return replicate(module, devices=slots, **SMALL)


def in_units(module: nn.Module, slots: Sequence[Any]) -> nn.Module:
    """`fully_shard`, of what the module says are its units, and of the module."""
    for unit in module.units() if hasattr(module, "units") else ():
        fully_shard(unit, devices=slots)
    return fully_shard(module, devices=slots)


FORMS: dict[str, Callable[..., nn.Module]] = {"replicate": in_small_buckets, "fully_shard": in_units}


def left_behind(module: nn.Module) -> list[Any]:
    """The module's values and gradients."""
    gradients = {name: detached(whole(parameter.grad)) for name, parameter in module.named_parameters()}
    return [detached({name: whole(value) for name, value in module.state_dict().items()}), gradients]


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
