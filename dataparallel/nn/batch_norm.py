"""BatchNorm over the chunks of all replicas: its two nodes of the graph, their exchange, and what they compute.

Each replica has the mean of its chunk, and the sum of squared distances from it (``M2``): `Statistics`. `merged` makes
the mean and the variance of the whole batch of them, by one exchange of two vectors in forward and one in backward.
Then each replica normalises its chunk: `Normalised`. The two nodes save the chunk in its own dtype.
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

PIECES = 8  # of a chunk, at most
VALUES = 64 * 1024  # of a piece, at least


class Statistics(Node):
    """``Statistics.apply(chunk)``: what a replica brings to the exchange, and two carriers for `Normalised`.

    The first result has the mean of each channel, M2 of each, and the count, shape (2 * channels + 1,). All are zeros
    for an empty chunk. The count is on the device too, where a copy from the host would have to wait.

    The gradient of the chunk is computed once, by this node's backward, when the exchange is done. So there is one
    tensor of the chunk's size beside the gradient of the output, as for BatchNorm. The part that does not depend on
    other replicas is ``scale * grad``, and the "gradients" of the carriers are these two factors.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.count = chunk.numel() // max(chunk.shape[1], 1)
        if ctx.count == 0:
            mean = m2 = chunk.new_zeros(chunk.shape[1], dtype=statistics_dtype(chunk.dtype))
        else:
            mean, m2 = statistics(chunk)
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
        return grad_of_chunk(chunk, mean, 2 * of_m2, of_mean / ctx.count, grad, scale)


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
    found = Gather.apply(devices[0], 0, *(own.unsqueeze(0) for (own,) in of_slots))
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
    mean, m2 = pooled(means, m2s, found[:, -1:], total)
    flat = Broadcast.apply(devices, mean, m2 / total)
    return [[*flat[k : k + 2], torch.tensor(total)] for k in range(0, len(flat), 2)]


class Normalised(Node):
    """``Normalised.apply(*carriers, chunk, mean, variance, weight, bias, eps)``: the chunk, as BatchNorm makes it.

    The chunk has no gradient here: see `Statistics`.
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
        return normalised(chunk, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        chunk, mean, variance, weight = ctx.saved_tensors
        inverse = (variance + ctx.eps).rsqrt()
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        of_sum, of_product = sums(grad, chunk, mean)
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


# ---- one chunk: four passes over its values --------------------------------------------------------------------------

# None of them needs a second tensor of the chunk's size beside its result. On CUDA they are the kernels of torch's own
# SyncBatchNorm: one launch each, which casts in registers. Elsewhere half precision is cast to float32, and distances
# are tensors, so a large chunk is cut into pieces, along its longest dimension because it may have few samples. The two
# of the backward are differentiable: where gradients are recorded they use torch's operators, for the whole chunk at
# once.


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of means and variances: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def pooled(means: Tensor, m2s: Tensor, sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The mean and M2 of each channel, of the means and M2s of parts of the values.

    M2 is the sum of squared distances from the mean. By the parallel formula of Chan, Golub and LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances" (1979), which does not lose digits as a sum of
    squares would.

    Args:
        means, m2s: shape (parts, channels).
        sizes: how many values of a channel each part has, shape (parts, 1).
        total: their sum.
    """
    mean = (means * (sizes / total)).sum(0)
    return mean, m2s.sum(0) + (sizes * (means - mean) ** 2).sum(0)


def statistics(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and M2 of each channel of a chunk that is not empty, in its `statistics_dtype`."""
    count = _values_of_a_channel(chunk)
    if _has_kernels(chunk):
        mean, inverse = torch.batch_norm_stats(_dense(chunk, chunk), 0.0)
        # For a variance of zero the kernel gives zero.
        return mean, torch.where(inverse == 0, inverse, count / inverse.square())
    dtype, pieces = statistics_dtype(chunk.dtype), _pieces(chunk, chunk)
    of_pieces = [torch.var_mean(piece.to(dtype), _dims(chunk), correction=0) for piece in pieces]
    # Written on the device: a copy from the host would have to wait. All pieces but the last have the same size.
    sizes = of_pieces[0][0].new_full((len(pieces), 1), _values_of_a_channel(pieces[0]))
    sizes[-1].fill_(_values_of_a_channel(pieces[-1]))
    means = torch.stack([mean for _, mean in of_pieces])
    return pooled(means, torch.stack([variance for variance, _ in of_pieces]) * sizes, sizes, count)


def normalised(
    chunk: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The chunk as BatchNorm makes it of these vectors, in its dtype. ``weight``, ``bias``: of any dtype."""
    weight, bias = (None if vector is None else vector.to(mean.dtype) for vector in (weight, bias))
    if _has_kernels(chunk):
        return torch.batch_norm_elemt(_dense(chunk, chunk), weight, bias, mean, (variance + eps).rsqrt(), eps)
    return functional.batch_norm(chunk, mean, variance, weight, bias, False, 0.0, eps)


def sums(grad: Tensor, chunk: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """For each channel the sum of ``grad``, and of its products with the distances of ``chunk`` from ``mean``."""
    if torch.is_grad_enabled():
        return _sums(grad, chunk, mean)
    if _has_kernels(chunk):
        ones = torch.ones_like(mean)
        of_grad, of_product, _, _ = torch.batch_norm_backward_reduce(
            _dense(grad, chunk), _dense(chunk, chunk), mean, ones, None, True, False, False
        )
        return of_grad, of_product
    found = [_sums(*pieces, mean) for pieces in zip(_pieces(grad, chunk), _pieces(chunk, chunk), strict=True)]
    of_grads, of_products = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    return of_grads, of_products


def _sums(grad: Tensor, chunk: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    of_product = (grad * (chunk - _per_channel(mean, chunk))).sum(_dims(chunk))
    return grad.sum(_dims(chunk), dtype=mean.dtype), of_product


def grad_of_chunk(
    chunk: Tensor, mean: Tensor, slope: Tensor, offset: Tensor, grad: Tensor | None, scale: Tensor | None
) -> Tensor:
    """``scale * grad + slope * (chunk - mean) + offset``, in the dtype and memory format of ``chunk``.

    Args:
        chunk: shape (samples, channels, ...); not empty.
        mean, slope, offset, scale: a value for each channel, in the `statistics_dtype` of ``chunk``.
        grad: of the shape and dtype of ``chunk``. ``None`` stands for zeros.
    """
    if torch.is_grad_enabled():
        return _grad_of_chunk(chunk, mean, slope, offset, grad, scale).to(chunk.dtype)
    if _has_kernels(chunk):
        return _grad_by_kernel(chunk, mean, slope, offset, grad, scale)
    result = torch.empty_like(chunk)
    targets, parts = _pieces(result, chunk), _pieces(chunk, chunk)
    grads = [None] * len(parts) if grad is None else _pieces(grad, chunk)
    for target, part, own in zip(targets, parts, grads, strict=True):
        target.copy_(_grad_of_chunk(part, mean, slope, offset, own, scale))
    return result


def _grad_of_chunk(
    chunk: Tensor, mean: Tensor, slope: Tensor, offset: Tensor, grad: Tensor | None, scale: Tensor | None
) -> Tensor:
    result = torch.addcmul(_per_channel(offset, chunk), _per_channel(slope, chunk), chunk - _per_channel(mean, chunk))
    return result if grad is None or scale is None else torch.addcmul(result, _per_channel(scale, chunk), grad)


def _grad_by_kernel(
    chunk: Tensor, mean: Tensor, slope: Tensor, offset: Tensor, grad: Tensor | None, scale: Tensor | None
) -> Tensor:
    """The kernel computes ``(grad - s / count - (chunk - mean) * inverse**2 * p / count) * inverse * weight``.

    Here ``inverse`` and ``count`` are one and ``weight`` is ``scale``, so ``s`` and ``p`` are divided by it. Where that
    is zero, the weight of the channel is. All replicas have the same weights, so slope and offset are zero too.
    """
    if grad is None or scale is None:
        grad, scale = torch.zeros_like(chunk), torch.ones_like(mean)
    divisor = scale.masked_fill(scale == 0, torch.inf)
    one = torch.ones(1, dtype=torch.int32, device=chunk.device)
    dense, ones = _dense(chunk, chunk), torch.ones_like(mean)
    s, p = -offset / divisor, -slope / divisor
    return torch.batch_norm_backward_elemt(_dense(grad, chunk), dense, mean, ones, scale, s, p, one)


def _has_kernels(chunk: Tensor) -> bool:
    """True if torch has the kernels of its own SyncBatchNorm for the device, and the chunk is not empty."""
    return chunk.is_cuda and chunk.numel() > 0


def _dense(tensor: Tensor, chunk: Tensor) -> Tensor:
    """``tensor`` in the memory format that the kernels take for ``chunk``: they read all tensors in the same order."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if chunk.is_contiguous(memory_format=layout):
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def _pieces(tensor: Tensor, chunk: Tensor) -> Sequence[Tensor]:
    """``tensor``, of the shape of ``chunk``, cut along the longest dimension that is not that of channels."""
    dim = max(_dims(chunk), key=lambda each: chunk.shape[each])
    return tensor.chunk(max(1, min(PIECES, chunk.numel() // VALUES)), dim)


def _values_of_a_channel(chunk: Tensor) -> int:
    return chunk.numel() // max(chunk.shape[1], 1)


def _dims(chunk: Tensor) -> list[int]:
    return [dim for dim in range(chunk.dim()) if dim != 1]


def _per_channel(vector: Tensor, chunk: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (chunk.dim() - 2))
