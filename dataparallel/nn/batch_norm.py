"""The arithmetic of BatchNorm over the chunks of all replicas.

Each replica has the mean of its chunk, and the sum of squared distances from it (``M2``). `merged` makes the mean and
the variance of the whole batch of them, by the parallel formula of Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances" (1979), which does not lose digits as a sum of squares would. Then
each replica normalises its chunk. The two functions of the graph here are local to a replica; what is between them, in
forward and in backward, is one exchange of two vectors.

Both save the chunk in its own dtype, and compute in `statistics_dtype`. They are twice differentiable. Only
``sync_batch_norm`` calls this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dataparallel.autograd.functions import Broadcast, Gather
from dataparallel.autograd.node import Node
from dataparallel.peers.across_machines import gathered

__all__ = ["Normalised", "Statistics", "merged", "statistics_dtype"]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of means and variances: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _dims(chunk: Tensor) -> list[int]:
    return [dim for dim in range(chunk.dim()) if dim != 1]


def _per_channel(vector: Tensor, chunk: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (chunk.dim() - 2))


class Statistics(Node):
    """``Statistics.apply(chunk)``: the mean of each channel, M2 of each, and the count, shape (2 * channels + 1,).

    All are zeros for an empty chunk. The count is on the device too, where a copy from the host would have to wait.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Tensor) -> Tensor:
        ctx.count = chunk.numel() // max(chunk.shape[1], 1)
        dtype = statistics_dtype(chunk.dtype)
        if ctx.count == 0:
            mean = m2 = chunk.new_zeros(chunk.shape[1], dtype=dtype)
        else:
            variance, mean = torch.var_mean(chunk.to(dtype), _dims(chunk), correction=0)
            m2 = variance * ctx.count
        found = torch.cat([mean, m2, mean.new_full((1,), ctx.count)])
        ctx.save_for_backward(chunk, found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        chunk, found = ctx.saved_tensors
        if ctx.count == 0:
            return torch.zeros_like(chunk)
        mean, of_mean, of_m2 = found[: chunk.shape[1]], *grad[:-1].chunk(2)
        distance = chunk.to(found.dtype) - _per_channel(mean, chunk)
        # The distances of a channel add up to zero, so that M2 does not depend on the mean to first order.
        result = _per_channel(of_mean / ctx.count, chunk) + _per_channel(2 * of_m2, chunk) * distance
        return result.to(chunk.dtype)


def merged(
    devices: Sequence[torch.device],
    of_slots: list[list[Tensor]],
    counts: list[int],
    machines: Any = None,
    text: str = "",
) -> list[list[Tensor]]:
    """For each replica the mean and the variance of the whole batch, and, on the CPU, how many values they are of.

    Args:
        devices: of the replicas.
        of_slots: for each replica a list with its `Statistics`.
        counts: how many values of a channel each replica has.
        machines, text: the ``machines.peer_rounds.PeerCall`` and the text of the request, if the batch is that of all
            machines.

    Raises:
        ValueError: there is one value of a channel in the whole batch.
    """
    found = Gather.apply(devices[0], 0, *(statistics.unsqueeze(0) for (statistics,) in of_slots))
    total = sum(counts)
    if machines is not None:
        (found,), totals = gathered(machines, text, [found], 0, note=total)
        total = sum(totals)
    if total <= 1:
        raise ValueError(
            f"SyncBatchNorm: {total} value of a channel in the whole batch; training needs more than one to have a "
            "variance"
        )
    (means, m2s), sizes = found[:, :-1].chunk(2, dim=1), found[:, -1:]
    mean = (means * (sizes / total)).sum(0)
    m2 = m2s.sum(0) + (sizes * (means - mean) ** 2).sum(0)
    flat = Broadcast.apply(devices, mean, m2 / total)
    return [[*flat[k : k + 2], torch.tensor(total)] for k in range(0, len(flat), 2)]


class Normalised(Node):
    """``Normalised.apply(chunk, mean, variance, weight, bias, eps)``: the chunk, as BatchNorm makes it of them."""

    @staticmethod
    def forward(
        ctx: Any, chunk: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.save_for_backward(chunk, mean, variance, weight)
        ctx.eps = eps
        return functional.batch_norm(chunk, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        chunk, mean, variance, weight = ctx.saved_tensors
        wide, dims = grad.to(mean.dtype), _dims(chunk)
        inverse = (variance + ctx.eps).rsqrt()
        distance = chunk.to(mean.dtype) - _per_channel(mean, chunk)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        of_sum, of_product = wide.sum(dims), (wide * distance).sum(dims)
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        return (
            (_per_channel(scale, chunk) * wide).to(chunk.dtype),
            -scale * of_sum,
            -0.5 * scale * inverse**2 * of_product,
            (inverse * of_product).to(weight.dtype) if needs_weight else None,
            of_sum if needs_bias else None,
            None,
        )
