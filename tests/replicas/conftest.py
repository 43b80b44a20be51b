"""A net with its samples, and wrappers whose replicas are watched while the garbage collector is off."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from circles import Watch
from dataparallel import DataParallel
from nets import Net, build, forget, samples


@pytest.fixture(autouse=True)
def nothing_asked_or_held() -> Iterator[None]:
    yield
    forget()


@pytest.fixture
def net(root: torch.device) -> Net:
    return build(root)


@pytest.fixture
def x(root: torch.device) -> Tensor:
    return samples(root)


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
