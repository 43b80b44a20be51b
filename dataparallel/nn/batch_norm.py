"""BatchNorm over the chunks of all replicas: its two nodes of the graph, and the exchange between them.

Each replica has the mean of its chunk, and the sum of squared distances from it (``M2``): `Statistics`. `merged` makes
the mean and the variance of the whole batch of them. Then each replica normalises its chunk: `Normalised`. The two
nodes are local to a replica; what is between them, in forward and in backward, is one exchange of two vectors.

The gradient of the chunk is computed once, by the backward of `Statistics`, when the exchange is done. So there is one
tensor of the chunk's size beside the gradient of the output, as for BatchNorm. The part that does not depend on other
replicas is ``scale * grad``, and `Normalised` hands it over as these two factors: `Statistics` returns two *carriers*
that only `Normalised` takes, and their "gradients" are the factors.

Both nodes save the chunk in its own dtype, and are twice differentiable. ``chunks`` has what they do with its values.
Only ``sync_batch_norm`` calls this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.autograd.functions import Broadcast, Gather
from dataparallel.autograd.node import Node
from dataparallel.nn import chunks
from dataparallel.peers.across_machines import gathered

__all__ = ["Normalised", "Statistics", "merged"]


class Statistics(Node):
    """``Statistics.apply(chunk)``: what a replica brings to the exchange, and two carriers for `Normalised`.

    The first result has the mean of each channel, M2 of each, and the count, shape (2 * channels + 1,). All are zeros
    for an empty chunk. The count is on the device too, where a copy from the host would have to wait.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.count = chunk.numel() // max(chunk.shape[1], 1)
        if ctx.count == 0:
            mean = m2 = chunk.new_zeros(chunk.shape[1], dtype=chunks.statistics_dtype(chunk.dtype))
        else:
            mean, m2 = chunks.statistics(chunk)
        found = torch.cat([mean, m2, mean.new_full((1,), ctx.count)])
        ctx.save_for_backward(chunk, found)
        ctx.set_materialize_grads(False)
        return found, chunk, torch.empty_like(mean)

    @staticmethod
    def backward(ctx: Any, of_found: Tensor | None, grad: Tensor | None, scale: Tensor | None) -> Tensor:
        chunk, found = ctx.saved_tensors
        if ctx.count == 0:
            return torch.zeros_like(chunk)
        mean, _ = found[:-1].chunk(2)
        of_mean, of_m2 = (torch.zeros_like(found) if of_found is None else of_found)[:-1].chunk(2)
        # The distances of a channel add up to zero, so that M2 does not depend on the mean to first order.
        return chunks.grad_of_chunk(chunk, mean, 2 * of_m2, of_mean / ctx.count, grad, scale)


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
    means, m2s = found[:, :-1].chunk(2, dim=1)
    mean, m2 = chunks.pooled(means, m2s, found[:, -1:], total)
    flat = Broadcast.apply(devices, mean, m2 / total)
    return [[*flat[k : k + 2], torch.tensor(total)] for k in range(0, len(flat), 2)]


class Normalised(Node):
    """``Normalised.apply(*carriers, chunk, mean, variance, weight, bias, eps)``: the chunk, as BatchNorm makes it.

    The chunk has no gradient here: `Statistics` adds it up from what the carriers carry.
    """

    @staticmethod
    def forward(
        ctx: Any,
        of_grad: Tensor,
        of_scale: Tensor,
        chunk: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        # The chunk itself is saved, not its carrier: a second backward adds its gradient to the chunk's own.
        ctx.save_for_backward(chunk, mean, variance, weight)
        ctx.eps, ctx.bias_dtype = eps, None if bias is None else bias.dtype
        return chunks.normalised(chunk, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        chunk, mean, variance, weight = ctx.saved_tensors
        inverse = (variance + ctx.eps).rsqrt()
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        of_sum, of_product = chunks.sums(grad, chunk, mean)
        needs_weight, needs_bias = ctx.needs_input_grad[5:7]
        return (
            grad,
            scale,
            None,
            -scale * of_sum,
            -0.5 * scale * inverse**2 * of_product,
            (inverse * of_product).to(weight.dtype) if needs_weight else None,
            of_sum.to(ctx.bias_dtype) if needs_bias else None,
            None,
        )
