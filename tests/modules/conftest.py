"""Wrappers whose replicas are watched while the garbage collector is off, for the tests of what frees them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from circles import Watch
from dataparallel import DataParallel


@pytest.fixture
def no_collector() -> Iterator[None]:
    # The first checkpoint of a process imports the compiler, and circles made by that hold the frames of the call.
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def watch(slots: list, root: torch.device) -> Callable[[nn.Module], Watch]:
    """A function from a module to a wrapper under watch."""

    def make(module: nn.Module) -> Watch:
        seen: list[weakref.ref] = []

        class Watched(DataParallel):
            def replicate(self, *args: Any) -> Any:
                replicas = super().replicate(*args)
                seen.extend(weakref.ref(each) for replica in replicas for each in replica.modules())
                return replicas

        return Watch(Watched(module.to(root), slots), seen)

    return make
