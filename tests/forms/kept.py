"""A wrapper with kept replicas, and a model with several buckets whose gradients tests compare."""

from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable import replicate
from dataparallel.forms.kept_tensors import KeptTensors
from dataparallel.replicas.kept_replicas import KeptReplicas

FIRST_BYTES, CAP_BYTES = 64, 600


def with_kept_replicas(module: nn.Module, slots: list, dim: int = 0, broadcast_buffers: bool = True) -> DataParallel:
    """A wrapper whose replicas persist; buckets hold a few parameters."""
    wrapped = DataParallel(module, slots, dim=dim)
    devices = [torch.device(slot) for slot in slots]
    # No form combines the two: the wrapper shows the tensors without what `replicate` does to a module.
    vars(wrapped.options)["kept"] = KeptReplicas(KeptTensors(devices, FIRST_BYTES, CAP_BYTES, broadcast_buffers))
    return wrapped


class Branched(nn.Module):
    """Layers, and a branch that only some samples take: a replica that has none of them does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.branch = nn.Linear(4, 2)

    def units(self) -> list[nn.Module]:
        """For `fully_shard`. The last layer is the module's own."""
        return [self.first, self.second, self.branch]

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        (taken,) = torch.where(x[:, 0] < 0)
        return y.index_add(0, taken, self.branch(x[taken])) if taken.numel() else y


def build(root: torch.device) -> Branched:
    torch.manual_seed(0)
    return Branched().double().to(root)


def numbers(root: torch.device, samples: int, seed: int = 0, positive: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    return (x.abs() if positive else x).to(root)


def numbers_of_slots(root: torch.device, slots: list, seed: int = 0) -> Tensor:
    """Two samples for each slot. The first column of one of them has the slot's number, from one on."""
    x = numbers(root, 2 * len(slots), seed=seed)
    x[::2, 0] = torch.arange(1, len(slots) + 1, dtype=x.dtype)
    return x


def loss(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def assert_same(found: list, expected: list) -> None:
    """Asserts that gradients are equal, or both `None`."""
    assert [each is None for each in found] == [each is None for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def tensors_of(module: nn.Module) -> KeptTensors:
    """The tensors of a replicated module's replicas, or of a wrapper's from `with_kept_replicas`."""
    found: Any = module.options.kept._tensors if isinstance(module, DataParallel) else replicate.state(module).tensors
    return found


def kept_on_slots(module: nn.Module) -> int:
    """How many gradients wait on the slots. No public name tells: a user sees only what a later backward adds."""
    return sum(len(waiting.by_slot) for waiting in tensors_of(module).sums._waiting.values())
