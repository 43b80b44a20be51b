"""What tests of living replicas share: the wrapper's stages around them, and a model with several buckets."""

import torch
from torch import Tensor, nn

from dataparallel import DataParallel
from dataparallel.composable.persistent_tensors import PersistentTensors
from dataparallel.kept.replicas import KeptReplicas

FIRST_BYTES, CAP_BYTES = 64, 600


def living(module: nn.Module, slots: list, dim: int = 0, broadcast_buffers: bool = True) -> DataParallel:
    """The wrapper, with replicas that stay; buckets hold a few parameters."""
    wrapped = DataParallel(module, slots, dim=dim)
    devices = [torch.device(slot) for slot in slots]
    wrapped._kept = KeptReplicas(PersistentTensors(devices, FIRST_BYTES, CAP_BYTES, broadcast_buffers))
    return wrapped


class Net(nn.Module):
    """Layers, and a branch that only some samples take: a replica that has none of them does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.branch = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        (taken,) = torch.where(x[:, 0] < 0)
        return y.index_add(0, taken, self.branch(x[taken])) if taken.numel() else y


def build(root: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().double().to(root)


def numbers(root: torch.device, samples: int, seed: int = 0, positive: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, dtype=torch.float64, generator=generator)
    return (x.abs() if positive else x).to(root)


def loss(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def assert_same(found: list, expected: list) -> None:
    """Gradients, `None` where the others are."""
    assert [each is None for each in found] == [each is None for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
