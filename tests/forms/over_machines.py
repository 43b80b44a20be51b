"""What the tests of `replicate` over machines share: a model that uses its parts by need, and training on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kept import Branched
from torch import Tensor, nn

from dataparallel.composable import replicate

FIRST_MB, CAP_MB = 64 / 2**20, 600 / 2**20


class Branches(Branched):
    """With a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


def build(device: torch.device, seed: int = 0) -> Branches:
    torch.manual_seed(seed)
    return Branches().double().to(device)


def batch_of(rank: int, step: int, sizes: Sequence[int] = (5, 4, 7)) -> Tensor:
    """The batch of a rank, which has its own size. In every third step only rank 0 takes the branch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(sizes[rank], 4, dtype=torch.float64, generator=generator)
    if step % 3 == 1:
        x[:, 0] = x[:, 0].abs()
        if rank == 0:
            x[-1, 0] *= -1
    if step % 3 == 2:
        x[:, 0] = x[:, 0].abs()
    return x


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum(dim=1).mean()


def over_machines(module: nn.Module, devices: Sequence[torch.device], **options: Any) -> Any:
    """The module, replicated over the default group if no other is given, in small buckets."""
    options = {"process_group": torch.distributed.group.WORLD, **options}
    return replicate(module, devices=devices, bucket_cap_mb=CAP_MB, first_bucket_mb=FIRST_MB, **options)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def weights(module: nn.Module) -> list[Tensor]:
    return [each.detach().cpu().clone() for each in (*module.parameters(), *module.buffers())]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.cpu().clone() for each in module.parameters()]


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [each is None for each in found] == [each is None for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            assert ours is not None
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def mean_over_ranks(module: nn.Module, losses: Sequence[Tensor], average: bool = True) -> None:
    """On one device: the backward of what all ranks do together."""
    total = torch.stack([*losses]).sum()
    (total / len(losses) if average else total).backward()
