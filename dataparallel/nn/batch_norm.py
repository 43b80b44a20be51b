"""BatchNorm over the chunks of all replicas, in three steps, of which the first and the last are nodes of the graph.

`Statistics` computes the mean of a replica's chunk and M2, the sum of squared distances from the mean. `merged` makes
the batch's mean and variance of all statistics, by one exchange of two vectors in forward and one in backward.
`Normalised` normalises the replica's chunk. Both nodes save the chunk in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dataparallel.autograd.functions import Broadcast, Gather
from dataparallel.autograd.node import Node
from dataparallel.comm.transport import summed_in
from dataparallel.peers.across_machines import gathered

MAX_PIECES = 8  # of a chunk
VALUES = 64 * 1024  # of a piece, at least


class Statistics(Node):
    """``statistics, *carriers = Statistics.apply(chunk)``: the statistics to exchange, two carriers for `Normalised`.

    The statistics are the mean of each channel, the M2 of each channel, and the count, shape (2 * channels + 1,). All
    are zeros for an empty chunk. The count is a value on the device, because a copy from the host would have to wait.

    This node's backward computes the chunk's gradient once, after the exchange. So only one tensor of the chunk's size
    is needed beside the gradient of the output, as in BatchNorm. The term ``scale * grad`` does not depend on other
    replicas. `Normalised` hands its two factors over as the "gradients" of the carriers.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.count = values_of_a_channel(chunk)
        if ctx.count == 0:
            mean = m2 = chunk.new_zeros(chunk.shape[1], dtype=summed_in(chunk.dtype))
        else:
            mean, m2 = statistics(chunk)
        result = torch.cat([mean, m2, mean.new_full((1,), ctx.count)])
        ctx.save_for_backward(chunk, result)
        ctx.set_materialize_grads(False)
        return result, chunk, torch.empty_like(mean)

    @staticmethod
    def backward(ctx: Any, grad_result: Tensor | None, grad: Tensor | None, scale: Tensor | None) -> Tensor:
        chunk, result = ctx.saved_tensors
        if ctx.count == 0:
            return torch.zeros_like(chunk)
        mean, _ = result[:-1].chunk(2)
        grad_mean, grad_m2 = (torch.zeros_like(result) if grad_result is None else grad_result)[:-1].chunk(2)
        # The distances of a channel add up to zero, so to first order M2 does not depend on the mean.
        return grad_of_chunk(chunk, mean, 2 * grad_m2, grad_mean / ctx.count, grad, scale)


def merged(
    devices: Sequence[torch.device],
    of_slots: list[list[Tensor]],
    counts: list[int],
    peer_call: Any = None,
    text: str = "",
) -> list[list[Tensor]]:
    """For each replica the mean and the variance of the whole batch, and, on the CPU, its number of values a channel.

    Args:
        devices: those of the replicas.
        of_slots: for each replica a list with one tensor, its statistics.
        counts: how many values of a channel each replica has.
        peer_call, text: the ``machines.peer_rounds.PeerCall`` and the text of the request, if the batch consists of the
            chunks of all machines.

    Raises:
        ValueError: there is one value of a channel in the whole batch.
    """
    rows = Gather.apply(devices[0], 0, *(statistics.unsqueeze(0) for (statistics,) in of_slots))
    total = sum(counts)
    if peer_call is not None:
        (rows,), totals = gathered(peer_call, text, [rows], 0, note=total)
        total = sum(totals)
    if total <= 1:
        raise ValueError(
            f"SyncBatchNorm: {total} value of a channel in the whole batch; training needs more than one to have a "
            "variance"
        )
    means, m2s = rows[:, :-1].chunk(2, dim=1)
    mean, m2 = pooled(means, m2s, rows[:, -1:], total)
    copies = Broadcast.apply(devices, mean, m2 / total)
    return [[*copies[k : k + 2], torch.tensor(total)] for k in range(0, len(copies), 2)]


class Normalised(Node):
    """``Normalised.apply(*carriers, chunk, mean, variance, weight, bias, eps)``: BatchNorm of the chunk.

    This node gives the chunk no gradient: see `Statistics`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_carrier: Tensor,
        scale_carrier: Tensor,
        chunk: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        # The chunk is saved, not its carrier, so that a second backward adds to the chunk's gradient.
        ctx.save_for_backward(chunk, mean, variance, weight)
        ctx.eps, ctx.bias_dtype = eps, None if bias is None else bias.dtype
        return normalised(chunk, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        chunk, mean, variance, weight = ctx.saved_tensors
        inverse = (variance + ctx.eps).rsqrt()
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        grad_sum, product_sum = sums(grad, chunk, mean)
        needs_weight, needs_bias = ctx.needs_input_grad[5:7]
        return (
            grad,
            scale,
            None,
            -scale * grad_sum,
            -0.5 * scale * inverse**2 * product_sum,
            (inverse * product_sum).to(weight.dtype) if needs_weight else None,
            grad_sum.to(ctx.bias_dtype) if needs_bias else None,
            None,
        )


# ---- one chunk: four passes over its values --------------------------------------------------------------------------

# No pass needs a second tensor of the chunk's size beside its result. On CUDA a pass is one kernel of torch's own
# SyncBatchNorm, which casts in registers. Elsewhere half precision is cast to float32, and distances are tensors, so a
# large chunk is cut into pieces, along its longest dimension because it may have few samples. The two passes of the
# backward are differentiable: while gradients are recorded they use torch's operators, for the whole chunk at once.


def pooled(means: Tensor, m2s: Tensor, sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The mean and M2 of each channel, computed from the means and M2s of groups of values.

    The formula is the parallel one of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979). It does not lose digits as a sum of squares would.

    Args:
        means, m2s: shape (groups, channels).
        sizes: how many values of a channel each group has, shape (groups, 1).
        total: the sum of the sizes.
    """
    mean = (means * (sizes / total)).sum(0)
    return mean, m2s.sum(0) + (sizes * (means - mean) ** 2).sum(0)


def statistics(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and M2 of each channel of a non-empty chunk, in the dtype in which chunks are summed."""
    count = values_of_a_channel(chunk)
    if _has_kernels(chunk):
        mean, inverse = torch.batch_norm_stats(_dense(chunk, chunk), 0.0)
        # For a variance of zero the kernel gives zero.
        return mean, torch.where(inverse == 0, inverse, count / inverse.square())
    dtype, pieces = summed_in(chunk.dtype), _pieces(chunk, chunk)
    of_pieces = [torch.var_mean(piece.to(dtype), _dims(chunk), correction=0) for piece in pieces]
    # The sizes are written on the device: a copy from the host would have to wait. Only the last piece may be smaller.
    sizes = of_pieces[0][0].new_full((len(pieces), 1), values_of_a_channel(pieces[0]))
    sizes[-1].fill_(values_of_a_channel(pieces[-1]))
    means = torch.stack([mean for _, mean in of_pieces])
    return pooled(means, torch.stack([variance for variance, _ in of_pieces]) * sizes, sizes, count)


def normalised(
    chunk: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """BatchNorm of the chunk with these vectors, in the chunk's dtype. ``weight`` and ``bias`` may have any dtype."""
    weight, bias = (None if vector is None else vector.to(mean.dtype) for vector in (weight, bias))
    if _has_kernels(chunk):
        return torch.batch_norm_elemt(_dense(chunk, chunk), weight, bias, mean, (variance + eps).rsqrt(), eps)
    return functional.batch_norm(chunk, mean, variance, weight, bias, False, 0.0, eps)


def sums(grad: Tensor, chunk: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """For each channel the sum of ``grad``, and the sum of ``grad * (chunk - mean)``."""
    if torch.is_grad_enabled():
        return _sums(grad, chunk, mean)
    if _has_kernels(chunk):
        ones = torch.ones_like(mean)
        grad_sum, product_sum, _, _ = torch.batch_norm_backward_reduce(
            _dense(grad, chunk), _dense(chunk, chunk), mean, ones, None, True, False, False
        )
        return grad_sum, product_sum
    of_pieces = [_sums(*pieces, mean) for pieces in zip(_pieces(grad, chunk), _pieces(chunk, chunk), strict=True)]
    grad_sum, product_sum = (torch.stack(each).sum(0) for each in zip(*of_pieces, strict=True))
    return grad_sum, product_sum


def _sums(grad: Tensor, chunk: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    product_sum = (grad * (chunk - _per_channel(mean, chunk))).sum(_dims(chunk))
    return grad.sum(_dims(chunk), dtype=mean.dtype), product_sum


def grad_of_chunk(
    chunk: Tensor, mean: Tensor, slope: Tensor, offset: Tensor, grad: Tensor | None, scale: Tensor | None
) -> Tensor:
    """``scale * grad + slope * (chunk - mean) + offset``, in the dtype and memory format of ``chunk``.

    Args:
        chunk: shape (samples, channels, ...); not empty.
        mean, slope, offset, scale: one value for each channel, in the dtype in which ``chunk`` is summed.
        grad: has the shape and dtype of ``chunk``. ``None`` stands for zeros.
    """
    if torch.is_grad_enabled():
        return _grad_of_chunk(chunk, mean, slope, offset, grad, scale).to(chunk.dtype)
    if _has_kernels(chunk):
        return _grad_by_kernel(chunk, mean, slope, offset, grad, scale)
    result = torch.empty_like(chunk)
    targets, pieces = _pieces(result, chunk), _pieces(chunk, chunk)
    grads = [None] * len(pieces) if grad is None else _pieces(grad, chunk)
    for target, piece, grad_of_piece in zip(targets, pieces, grads, strict=True):
        target.copy_(_grad_of_chunk(piece, mean, slope, offset, grad_of_piece, scale))
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

    With ones for ``inverse`` and ``count`` and ``scale`` for ``weight``, ``s`` and ``p`` have to be divided by the
    scale. Where that is zero, the channel's weight is zero on all replicas, so slope and offset are zero too.
    """
    if grad is None or scale is None:
        grad, scale = torch.zeros_like(chunk), torch.ones_like(mean)
    divisor = scale.masked_fill(scale == 0, torch.inf)
    one = torch.ones(1, dtype=torch.int32, device=chunk.device)
    dense, ones = _dense(chunk, chunk), torch.ones_like(mean)
    s, p = -offset / divisor, -slope / divisor
    return torch.batch_norm_backward_elemt(_dense(grad, chunk), dense, mean, ones, scale, s, p, one)


def _has_kernels(chunk: Tensor) -> bool:
    """True if the kernels of torch's own SyncBatchNorm can run: on CUDA, for a chunk that is not empty."""
    return chunk.is_cuda and chunk.numel() > 0


def _dense(tensor: Tensor, chunk: Tensor) -> Tensor:
    """``tensor`` in the memory format of ``chunk``, because the kernels read all tensors in the same order."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if chunk.is_contiguous(memory_format=layout):
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def _pieces(tensor: Tensor, chunk: Tensor) -> Sequence[Tensor]:
    """``tensor``, which has the shape of ``chunk``, cut along the longest dimension except that of the channels."""
    dim = max(_dims(chunk), key=lambda each: chunk.shape[each])
    return tensor.chunk(max(1, min(MAX_PIECES, chunk.numel() // VALUES)), dim)


def values_of_a_channel(chunk: Tensor) -> int:
    """How many values a channel has."""
    return chunk.numel() // max(chunk.shape[1], 1)


def _dims(chunk: Tensor) -> list[int]:
    return [dim for dim in range(chunk.dim()) if dim != 1]


def _per_channel(vector: Tensor, chunk: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (chunk.dim() - 2))
