"""`SyncBatchNorm`: BatchNorm over the whole batch, in replicas with a chunk each, and conversions to it and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from dataparallel import _torch
from dataparallel.nn.batch_norm import Normalised, Statistics, merged, values_of_a_channel
from dataparallel.peers.joint import JointSpan, Request, described, joint, replayed_place, span_of_caller

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
        """Updates the running statistics, without waiting for the device."""
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
    """Checks the argument of a form on these slots.

    Args:
        module: to be wrapped.
        sync_batch_norm: the argument of the wrapper.
        slots: of the wrapper.
        machines: the wrapper spans machines.

    Raises:
        TypeError: ``sync_batch_norm`` is neither a bool nor "across_machines".
        ValueError: it is false, there are several slots, and the module contains a ``torch.nn.SyncBatchNorm``, which
            needs a process for each device; "across_machines" for a wrapper that does not span machines.
    """
    if not isinstance(sync_batch_norm, bool) and sync_batch_norm != _ACROSS:
        raise TypeError(f"sync_batch_norm={sync_batch_norm!r}: expected True, False or {_ACROSS!r}")
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
