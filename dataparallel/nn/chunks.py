"""What BatchNorm does with one chunk: four passes over its values. They know nothing of replicas and graphs.

`statistics` and `normalised` are the forward, `sums` and `grad_of_chunk` the backward. None of them needs a second
tensor of the chunk's size beside its result, whatever the dtype:

- On CUDA they are the kernels of torch's own SyncBatchNorm. Each is one launch, and casts in registers.
- Elsewhere half precision is cast to float32, and distances are tensors. So a large chunk is cut into pieces. They are
  cut along its longest dimension, because a chunk may have few samples.

The two of the backward are differentiable where gradients are recorded. They then compute the same with the operators
of torch, for the whole chunk at once. Only ``batch_norm`` calls this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["grad_of_chunk", "normalised", "pooled", "statistics", "statistics_dtype", "sums"]

PIECES = 8  # of a chunk, at most
VALUES = 64 * 1024  # of a piece, at least


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
