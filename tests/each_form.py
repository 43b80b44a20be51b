"""The three forms, for sentences that hold in each of them; the fixture `form` is a run with each.

A form is called with a module, the slots and options, and returns what is called in the module's place. Both composable
forms return the module itself, and `fully_shard` gives it other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import fully_shard, replicate

Form = Callable[..., Any]


def by_wrapper(module: nn.Module, slots: Sequence[Any] | None = None, **options: Any) -> Any:
    return DataParallel(module, slots, **options)


def replicated(module: nn.Module, slots: Sequence[Any] | None = None, **options: Any) -> Any:
    return replicate(module, devices=slots, **options)


def sharded_whole(module: nn.Module, slots: Sequence[Any] | None = None, **options: Any) -> Any:
    """The module is one unit."""
    return fully_shard(module, devices=slots, **options)


def sharded_children(module: nn.Module, slots: Sequence[Any] | None = None, **options: Any) -> Any:
    """Each child with parameters is a unit, and the rest is one. Full parameters stay until backward."""
    children = [child for each in module.children() for child in (each if isinstance(each, nn.ModuleList) else [each])]
    for child in children:
        if any(True for _ in child.parameters()):
            fully_shard(child, devices=slots, reshard_after_forward=False)
    return fully_shard(module, devices=slots, reshard_after_forward=False, **options)


FORMS: dict[str, Form] = {"DataParallel": by_wrapper, "replicate": replicated, "fully_shard": sharded_whole}

composable_forms = pytest.mark.parametrize(
    "form", [replicated, sharded_whole], ids=["replicate", "fully_shard"], indirect=True
)
replicating_forms = pytest.mark.parametrize(
    "form", [by_wrapper, replicated], ids=["DataParallel", "replicate"], indirect=True
)
graphing_forms = pytest.mark.parametrize(
    "form",
    [by_wrapper, replicated, sharded_children],
    ids=["DataParallel", "replicate", "fully_shard"],
    indirect=True,
)


def frozen(model: Any) -> Any:
    """A block in which the replicas of a wrapper or of a replicated module stay."""
    return model.options.frozen() if isinstance(model, DataParallel) else model.frozen()


def whole(tensor: Any) -> Tensor:
    """The tensor, or the whole of a sharded one."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
