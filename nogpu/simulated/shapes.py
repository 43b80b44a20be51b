"""Lets torch's meta kernels answer as the CPU's kernels do, for devices without values and for captures.

torch has one meta kernel for an operator, and some kernels of the CPU have other auxiliary results than those of CUDA:
other shapes, other dtypes, more memory. On simulated devices the CPU's count, because these run with ``compute=True``.
Meta kernels that ask for the device are told that it is the CPU. For the other operators this file has rules, as
operators of the same names in the namespace ``sim_shapes``: ``csrc/shared/skipped.cpp`` calls them in place of torch's.
`simulate` and the start of ``nogpu.cuda`` call this file once, before there is a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.library import Library

aten = torch.ops.aten

_rules: list[Library] = []  # they end with the library that has made them


def answer_as_the_cpu(in_kernel: Callable[[], bool]) -> None:
    """Changes what these devices see of torch's meta kernels. Meta tensors of the user see no change.

    Args:
        in_kernel: says if the calling thread is in a meta kernel that these devices have called.
    """
    _tell_the_device(in_kernel)
    rules = Library("sim_shapes", "DEF")
    for op in STATISTICS_IN_TRAINING:
        _add(rules, op, _statistics)
    for op in BATCH_NORMS:
        _add(rules, op, _batch_norm)
    for op in LOSSES:
        _add(rules, op, _loss)
    for op in WRITING_BACKWARDS:
        _add(rules, op, _written_gradient)
    for op in EMBEDDING_BAGS:
        _add(rules, op, _embedding_bag)
    for op in CHANNELS_KEPT_LAST:
        _add(rules, op, _channels_kept_last)
    _add(rules, aten.convolution.default, _convolution)
    for op in NORMALISING_BACKWARDS:
        _add(rules, op, _gradient_like_the_input)
    _add(rules, aten._transformer_encoder_layer_fwd.default, _like_the_source)
    _rules.append(rules)


def _tell_the_device(in_kernel: Callable[[], bool]) -> None:
    from torch import _meta_registrations as meta

    device_hint = meta.device_hint

    def hint(tensor: Any) -> str:
        answer: str = "cpu" if in_kernel() else device_hint(tensor)
        return answer

    meta.device_hint = hint


def _add(rules: Library, op: Any, rule: Callable[..., Any]) -> None:
    rules.define(str(op._schema).removeprefix("aten::"))
    rules.impl(op.name().removeprefix("aten::"), lambda *arguments, **options: rule(op, *arguments, **options), "Meta")


def _dtype_of_statistics(input: Tensor, parameters: tuple[Any, ...]) -> torch.dtype:
    """float32 for an input of lower precision with parameters in float32, otherwise the input's."""
    is_low = input.dtype in (torch.bfloat16, torch.float16)
    is_mixed = is_low and any(isinstance(p, Tensor) and p.dtype == torch.float32 for p in parameters)
    return torch.float32 if is_mixed else input.dtype


STATISTICS_IN_TRAINING = [aten.native_layer_norm.default, aten.native_group_norm.default]


def _statistics(op: Any, input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    output, *statistics = op(input, *arguments)
    dtype = _dtype_of_statistics(input, arguments)
    return output, *(values.new_empty(values.shape, dtype=dtype) for values in statistics)


BATCH_NORMS = [
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_no_update.default,
]


def _batch_norm(op: Any, input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The mean and the reciprocal deviation of the batch have no elements outside training."""
    output, mean, deviation, *reserved = op(input, *arguments)
    flags = [argument for argument in arguments if isinstance(argument, bool)]
    is_training = flags[0] if flags else op is aten._batch_norm_with_update.default
    shape, dtype = (mean.shape if is_training else (0,)), _dtype_of_statistics(input, arguments)
    return output, mean.new_empty(shape, dtype=dtype), deviation.new_empty(shape, dtype=dtype), *reserved


LOSSES = [
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
]


def _loss(op: Any, input: Tensor, target: Tensor, *arguments: Any) -> Tensor:
    """A loss that is reduced keeps the memory of the losses of all elements."""
    result: Tensor = op(input, target, *arguments)
    if result.dim() == 0:
        return result.new_empty(torch.broadcast_shapes(input.shape, target.shape)).resize_(())
    return result


WRITING_BACKWARDS = [aten.smooth_l1_loss_backward.grad_input, aten.huber_loss_backward.out]


def _written_gradient(op: Any, *_: Any, grad_input: Tensor) -> Tensor:
    """torch's meta kernels return another tensor than the one they are to write, if its precision is low."""
    return grad_input


EMBEDDING_BAGS = [aten._embedding_bag.default, aten._embedding_bag_forward_only.default]


def _embedding_bag(
    op: Any,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, ...]:
    """Sums without padding have no list of the samples' bags. ``mode`` is 0 for sums, 1 for means, 2 for maxima."""
    options = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
    output, samples, sizes, maxima = op(weight, indices, offsets, *options)
    is_plain = mode == 0 and padding_idx < 0 and weight.stride(1) == 1 and weight.dtype != torch.float64
    if is_plain and (per_sample_weights is None or per_sample_weights.stride(0) == 1):
        samples = samples.new_empty(0)
    else:
        samples = samples.new_empty(indices.shape[0] + 1).resize_(indices.shape[0])  # keeps the memory of one more
    has_all = mode == 0 and op is aten._embedding_bag_forward_only.default
    sizes = sizes.new_empty(offsets.shape[0]).resize_(offsets.shape[0] if has_all else output.shape[0])
    maxima = maxima.new_empty(output.shape if mode == 2 else sizes.shape)
    return output, samples, sizes, maxima


def _convolution(op: Any, input: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    """The channels come last if they do in the input or in the weight. Transposed convolutions have their own way."""
    output: Tensor = op(input, weight, *arguments)
    is_transposed = arguments[4]
    if output.dim() in (4, 5) and not is_transposed and output.dtype != torch.float64:
        last = torch.channels_last if output.dim() == 4 else torch.channels_last_3d
        if last in (suggest_memory_format(input), suggest_memory_format(weight)):
            return torch.empty_like(output, memory_format=last)
    return output


NORMALISING_BACKWARDS = [
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    aten.native_group_norm_backward.default,
]


def _gradient_like_the_input(op: Any, gradient: Tensor, input: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    of_input, *others = op(gradient, input, *arguments)
    if of_input is not None:
        of_input = torch.empty_like(of_input, dtype=input.dtype, memory_format=suggest_memory_format(input))
    return of_input, *others


CHANNELS_KEPT_LAST = [aten.max_unpool2d.default, aten.reflection_pad2d.default, aten.replication_pad2d.default]


def _channels_kept_last(op: Any, input: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(op(input, *arguments), memory_format=suggest_memory_format(input))


def _like_the_source(op: Any, source: Tensor, *arguments: Any) -> Tensor:
    """A layer's result, which torch 2.11 has no meta kernel for."""
    return torch.empty_like(source)
