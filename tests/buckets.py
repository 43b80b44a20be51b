"""What tests of a bucket's nodes share: copies of the sources, a loss of them, and the gradients of that loss."""

from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.bucket_gradients import GradientStreams, broadcast_bucket
from dataparallel.comm.streams.current import current_streams


def broadcast(slots: list, sources: list[Tensor], **arguments: Any) -> list[tuple[Tensor, ...]]:
    devices = [torch.device(slot) for slot in slots]
    return broadcast_bucket(
        devices, sources, GradientStreams.for_forward(devices, current_streams(devices)), **arguments
    )


def loss_of(copies: list[tuple[Tensor, ...]], root: torch.device, uses: Any = lambda slot, i: True) -> Tensor:
    """Each slot's gradient is its number, from 1 on, times the copy's position, from 1 on, times twice the copy."""
    losses = [
        (slot + 1) * (i + 1) * copy.square().sum().to(root)
        for slot, of_slot in enumerate(copies)
        for i, copy in enumerate(of_slot)
        if uses(slot, i)
    ]
    return sum(losses)  # type: ignore[return-value]


def expected(sources: list[Tensor], slots: list, uses: Any = lambda slot, i: True) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for i, source in enumerate(sources):
        weight = sum(slot + 1 for slot in range(len(slots)) if uses(slot, i))
        found.append(2 * (i + 1) * weight * source.detach() if weight else None)
    return found


def check(sources: list[Tensor], wanted: list[Tensor | None]) -> None:
    for source, gradient in zip(sources, wanted, strict=True):
        if gradient is None:
            assert source.grad is None
        else:
            torch.testing.assert_close(source.grad, gradient, rtol=1e-12, atol=0)
