"""`SyncBatchNorm`: BatchNorm over the whole batch, in replicas with a chunk each, and conversions to it and back.

Nodes of the graph compute a chunk's `Statistics` and normalise it, and save the chunk in its own dtype. Between them
`merged` makes the statistics of the batch, by one exchange of two vectors in forward and one in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from dataparallel import _torch
from dataparallel.arguments import checked
from dataparallel.autograd.functions import Broadcast, Gather
from dataparallel.autograd.node import Node
from dataparallel.comm.tables import summed_in
from dataparallel.devices import CPU
from dataparallel.peers.across_machines import gathered
from dataparallel.peers.joint import JointSpan, Request, described, joint, replayed_place, span_of_caller


class Statistics(Node):
    """``statistics, *carriers = Statistics.apply(chunk)``: the statistics to exchange, two carriers for `Normalised`.

    The statistics are each channel's mean, each channel's M2 (the sum of squared distances from the mean), and the
    count, shape (2 * channels + 1,). All are zeros for an empty chunk. The count is a value on the device, because a
    copy from the host would have to wait.

    This node's backward computes the chunk's gradient once, after the exchange. So on CUDA only one tensor of the
    chunk's size is needed beside the gradient of the output, as in BatchNorm. The term ``scale * grad`` does not depend
    on other replicas. `Normalised` hands its two factors over as the "gradients" of the carriers.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.count = values_of_a_channel(chunk)
        if ctx.count == 0:
            mean = m2 = chunk.new_zeros(chunk.shape[1], dtype=summed_in(chunk.dtype))
        elif _has_kernels(chunk):
            mean, inverse = torch.batch_norm_stats(_dense(chunk, chunk), 0.0)
            # For a variance of zero the kernel gives zero.
            m2 = torch.where(inverse == 0, inverse, ctx.count / inverse.square())
        else:
            variance, mean = torch.var_mean(chunk.to(summed_in(chunk.dtype)), _dims(chunk), correction=0)
            m2 = variance * ctx.count
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

    ``counts``: how many values of a channel each replica has. ``peer_call`` and ``text``: of the request, if the batch
    consists of the chunks of all machines.
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
    sizes = rows[:, -1:]
    # By the parallel formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    # sample variances" (1979). It does not lose digits as a sum of squares would.
    mean = (means * (sizes / total)).sum(0)
    m2 = m2s.sum(0) + (sizes * (means - mean) ** 2).sum(0)
    copies = Broadcast.apply(devices, mean, m2 / total)
    return [[*copies[k : k + 2], torch.tensor(total, device=CPU)] for k in range(0, len(copies), 2)]


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

# On CUDA a pass is one kernel of torch's own SyncBatchNorm, which casts in registers. The two passes of the backward
# are differentiable: while gradients are recorded they use torch's operators.


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
    if _has_kernels(chunk) and not torch.is_grad_enabled():
        ones = torch.ones_like(mean)
        grad_sum, product_sum, _, _ = torch.batch_norm_backward_reduce(
            _dense(grad, chunk), _dense(chunk, chunk), mean, ones, None, True, False, False
        )
        return grad_sum, product_sum
    product_sum = (grad * (chunk - _per_channel(mean, chunk))).sum(_dims(chunk))
    return grad.sum(_dims(chunk), dtype=mean.dtype), product_sum


def grad_of_chunk(
    chunk: Tensor, mean: Tensor, slope: Tensor, offset: Tensor, grad: Tensor | None, scale: Tensor | None
) -> Tensor:
    """``scale * grad + slope * (chunk - mean) + offset``, in the dtype of ``chunk``.

    All but ``chunk`` and ``grad`` have one value for each channel, in the dtype in which ``chunk`` is summed. A
    ``grad`` of ``None`` stands for zeros.
    """
    if _has_kernels(chunk) and not torch.is_grad_enabled():
        # The kernel computes ``(grad - s / count - (chunk - mean) * inverse**2 * p / count) * inverse * weight``. With
        # ones for ``inverse`` and ``count`` and ``scale`` for ``weight``, ``s`` and ``p`` have to be divided by the
        # scale. Where that is zero, the channel's weight is zero on all replicas, so slope and offset are zero too.
        if grad is None or scale is None:
            grad, scale = torch.zeros_like(chunk), torch.ones_like(mean)
        divisor = scale.masked_fill(scale == 0, torch.inf)
        one = torch.ones(1, dtype=torch.int32, device=chunk.device)
        dense, ones = _dense(chunk, chunk), torch.ones_like(mean)
        s, p = -offset / divisor, -slope / divisor
        return torch.batch_norm_backward_elemt(_dense(grad, chunk), dense, mean, ones, scale, s, p, one)
    result = torch.addcmul(_per_channel(offset, chunk), _per_channel(slope, chunk), chunk - _per_channel(mean, chunk))
    if grad is not None and scale is not None:
        result = torch.addcmul(result, _per_channel(scale, chunk), grad)
    return result.to(chunk.dtype)


def _has_kernels(chunk: Tensor) -> bool:
    """True if the kernels of torch's own SyncBatchNorm can run: on CUDA, for a chunk that is not empty."""
    return chunk.is_cuda and chunk.numel() > 0


def _dense(tensor: Tensor, chunk: Tensor) -> Tensor:
    """``tensor`` in the memory format of ``chunk``, because the kernels read all tensors in the same order."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if chunk.is_contiguous(memory_format=layout):
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def values_of_a_channel(chunk: Tensor) -> int:
    return chunk.numel() // max(chunk.shape[1], 1)


def _dims(chunk: Tensor) -> list[int]:
    return [dim for dim in range(chunk.dim()) if dim != 1]


def _per_channel(vector: Tensor, chunk: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (chunk.dim() - 2))


M = TypeVar("M", bound=nn.Module)

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_PLAIN = "_dataparallel_plain_class"
_ACROSS = "across_machines"


class BatchNorm(_BatchNorm):
    """BatchNorm of inputs with any number of dimensions: (samples, channels, ...)."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of shape (samples, channels, ...); got {[*input.shape]}")


class SyncBatchNorm(BatchNorm):
    """BatchNorm whose statistics are those of the whole batch, over the chunks of all replicas.

    In training inside of a parallel forward, of ``DataParallel``, ``composable.replicate`` or ``fully_shard``, each
    layer meets the other replicas once in forward, and its gradients once in backward. Outputs, gradients and running
    statistics are those of one device with the whole batch. In eval mode, with a single replica and outside of a
    parallel forward it is torch's BatchNorm.

    Arguments, parameters, buffers and the state dict are those of ``torch.nn.BatchNorm2d``. Inputs have the shape
    (samples, channels, ...), and chunks may differ in their numbers of samples; one may be empty. For half precision
    the statistics are in float32. A recomputation by ``peers.checkpoint`` leaves the running statistics alone.

    Attributes:
        across_machines: if true, and the form spans machines, the batch is that of all machines. May be assigned, on
            all machines alike.

    Raises:
        ValueError: an input with fewer than 2 dimensions; one value of a channel in the whole batch.
        RuntimeError: other replicas do not come to the same layer: see ``peers``.
    """

    across_machines = False

    def forward(self, input: Tensor) -> Tensor:
        """The normalised chunk, in the input's dtype and memory format."""
        self._check_input_dim(input)
        synchronises = self.training or self.running_mean is None
        span = span_of_caller(self.across_machines) if synchronises else None
        return super().forward(input) if span is None else self._synchronised(input, span)

    @_torch.not_traced
    def _synchronised(self, chunk: Tensor, span: JointSpan) -> Tensor:
        with torch.autocast(chunk.device.type, enabled=False):
            statistics, *carriers = Statistics.apply(chunk)
            is_across = span.peer_call is not None
            inference = torch.is_inference_mode_enabled()
            request = Request("SyncBatchNorm", "", described([statistics]), inference, across_machines=is_across)
            together = partial(merged, peer_call=span.peer_call, text=str(request))
            count = values_of_a_channel(chunk)
            mean, variance, total = joint(span.place, request, [statistics], together, count)
            if self.training and self.track_running_stats and replayed_place() is None:
                self._update_running(mean.detach(), variance.detach() * (int(total) / (int(total) - 1)))
            return Normalised.apply(*carriers, chunk, mean, variance, self.weight, self.bias, self.eps)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_(running + factor * (new - running))  # rounded once, where buffers are in half precision

    @staticmethod
    def convert(module: M, across_machines: bool = False) -> M:
        """Makes each ``BatchNorm1d``, ``2d``, ``3d`` and ``torch.nn.SyncBatchNorm`` of a tree a `SyncBatchNorm`.

        The modules stay the same objects, with their parameters, buffers, hooks and settings, so that optimizers and
        references to them are not affected. Only their class changes. Subclasses are left as they are, because nobody
        knows what they compute.

        Args:
            module: the root of the tree.
            across_machines: an attribute that each of them gets.

        Returns:
            ``module``.

        Raises:
            ValueError: a lazy BatchNorm, which has no class yet to go back to: call the model once before.
        """
        across_machines = checked("across_machines", across_machines, bool)
        found = [child for child in module.modules() if type(child) in _CONVERTED]
        for name, child in module.named_modules():
            if isinstance(child, _LazyNormBase) and isinstance(child, _BatchNorm):
                what = f"{name or 'the module'} is a {type(child).__name__}"
                raise ValueError(f"{what}: call the model once, then convert it")
        for child in found:
            child.__dict__[_PLAIN] = type(child)
            child.__class__ = SyncBatchNorm
            child.__dict__["across_machines"] = across_machines
        return module

    @staticmethod
    def revert(module: M) -> M:
        """Makes each `SyncBatchNorm` of a tree what it was before `convert`.

        One that was a ``torch.nn.SyncBatchNorm``, or was made as a `SyncBatchNorm`, becomes a `BatchNorm`, which takes
        inputs with any number of dimensions.

        Returns:
            ``module``.
        """
        for child in module.modules():
            if type(child) is SyncBatchNorm:
                plain = child.__dict__.pop(_PLAIN, BatchNorm)
                child.__dict__.pop("across_machines", None)
                child.__class__ = BatchNorm if plain is nn.SyncBatchNorm else plain  # type: ignore[assignment]
        return module


def prepare(
    module: nn.Module, sync_batch_norm: bool | str, slots: Sequence[torch.device], machines: bool = False
) -> None:
    """For a form on these slots: converts the module if that is asked for, after `check_sync_batch_norm`."""
    check_sync_batch_norm(module, sync_batch_norm, slots, machines)
    if sync_batch_norm:
        SyncBatchNorm.convert(module, across_machines=sync_batch_norm == _ACROSS)


def check_sync_batch_norm(
    module: nn.Module, sync_batch_norm: bool | str, slots: Sequence[torch.device], machines: bool = False
) -> None:
    """Checks the argument of a form on these slots. ``machines``: the form spans machines."""
    if sync_batch_norm == _ACROSS and not machines:
        raise ValueError(
            f"sync_batch_norm={_ACROSS!r}: there is one machine only; pass a process_group or a mesh to a form of "
            "dataparallel.composable, or sync_batch_norm=True"
        )
    for name, child in module.named_modules() if len(slots) > 1 and not sync_batch_norm else ():
        if type(child) is nn.SyncBatchNorm:
            raise ValueError(
                f"{name or 'the module'} is a torch.nn.SyncBatchNorm, which works with a process for each device only: "
                "convert the model by dataparallel.nn.SyncBatchNorm.convert(model), or pass sync_batch_norm=True"
            )
