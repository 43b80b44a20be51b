"""The loss on the replicas: each computes that of its chunk, and only scalars go to the output device.

A form with ``loss=criterion`` keeps a `ReplicaLoss`. Each replica has a total and a count (`Part`). The loss of the
whole batch is the sum of the totals over that of the counts. What a chunk counts depends on the criterion.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dataparallel.batches.batch_types import batch_of
from dataparallel.batches.structures import is_whole, leaves
from dataparallel.replicas.placement import check_placement
from dataparallel.replicas.replicate import make_replicas
from dataparallel.samples import Samples

Criterion = Callable[[Any, Any], Any]

TARGET, OUTPUTS = "target", "outputs"


class Part(NamedTuple):
    """The loss of a chunk. ``count`` is ``None`` if nothing is divided, and ``total`` then is the loss itself."""

    total: Any
    count: Any
    output: Any


class ReplicaLoss:
    """A criterion, and how the losses of chunks become that of the batch.

    ============================================  =====================================================================
    the criterion                                 what a chunk counts
    ============================================  =====================================================================
    ``reduction="none"``                          nothing: losses are gathered as outputs are
    ``reduction="sum"``                           nothing: losses are added
    ``CrossEntropyLoss``, ``NLLLoss`` of classes  the weights of its targets, without those that are ignored
    returns ``(total, count)``                    ``count``
    any other                                     its samples: the loss of a chunk is a mean over them
    ============================================  =====================================================================

    Args:
        criterion: ``criterion(output, target)`` returns a tensor, or a pair of a total and a count.
        module: what is wrapped.

    Raises:
        TypeError: ``criterion`` cannot be called.
        ValueError: ``module.forward`` has a parameter named ``target`` or ``outputs``.
    """

    def __init__(self, criterion: Criterion, module: nn.Module) -> None:
        if not callable(criterion):
            raise TypeError(f"loss={criterion!r}: expected a module or a function of an output and a target")
        taken = {TARGET, OUTPUTS} & inspect.signature(module.forward).parameters.keys()
        if taken:
            raise ValueError(
                f"forward of {type(module).__name__} has a parameter {sorted(taken)[0]!r}, which has another meaning "
                "with loss=: rename the parameter, or compute the loss in forward"
            )
        self.criterion = criterion

    def asked(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], CallLoss | None]:
        """The arguments of a call without ``outputs``, and its loss; ``None`` if none is asked for.

        Raises:
            TypeError: ``outputs`` without ``target``.
        """
        if TARGET in kwargs:
            others = {name: value for name, value in kwargs.items() if name != OUTPUTS}
            return others, CallLoss(self.criterion, bool(kwargs.get(OUTPUTS)))
        if OUTPUTS in kwargs:
            raise TypeError("outputs= goes with target=: without a target the call returns outputs anyway")
        return kwargs, None


class CallLoss:
    """The loss of one call. ``keeps``: outputs are asked for too."""

    def __init__(self, criterion: Criterion, keeps: bool) -> None:
        self._criterion, self._keeps = criterion, keeps

    def on_slots(
        self, slots: Sequence[torch.device], kwargs: Sequence[dict[str, Any]], dim: int, cap_bytes: int
    ) -> list[Callable[[Any], Part]]:
        """For each slot what computes the loss of its output. Takes the targets out of ``kwargs``.

        Raises:
            RuntimeError: a tensor of the criterion is not on the first slot.
        """
        criteria: Sequence[Any] = [self._criterion] * len(slots)
        if isinstance(self._criterion, nn.Module) and _has_tensors(self._criterion):
            check_placement(self._criterion, slots[0])
            criteria = make_replicas(self._criterion, [*slots], cap_bytes)
        return [
            partial(_part, criterion, own.pop(TARGET), dim, self._keeps)
            for criterion, own in zip(criteria, kwargs, strict=True)
        ]

    def alone(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The call without replicas, of which ``run`` makes the output."""

        def run_with_loss(*inputs: Any, **kwargs: Any) -> Any:
            target = kwargs.pop(TARGET)
            output = run(*inputs, **kwargs)
            loss = self._criterion(output, target)
            if isinstance(loss, tuple):
                total, count = loss
                loss = total / count
            return (loss, output) if self._keeps else loss

        return run_with_loss

    def of_batch(self, parts: Sequence[Part], gather: Callable[[list[Any]], Any]) -> Any:
        """The loss of the whole batch on the output device, with the gathered outputs if they are asked for."""
        loss = gather([part.total for part in parts])
        if parts[0].count is not None:
            counts = [part.count for part in parts]
            loss = loss.sum() / (gather(counts).sum() if isinstance(counts[0], Tensor) else sum(counts))
        elif parts[0].total.dim() == 0:
            loss = loss.sum()
        return (loss, gather([part.output for part in parts])) if self._keeps else loss


def _has_tensors(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _part(criterion: Any, target: Any, dim: int, keeps: bool, output: Any) -> Part:
    """The loss of a chunk, computed in its replica."""
    kept = output if keeps else None
    if getattr(criterion, "reduction", None) == "mean" and _has_classes(criterion, target):
        total = _summing(criterion)(output, target)
        return Part(total, _counted(criterion, target).to(total.dtype), kept)
    loss = criterion(output, target)
    if isinstance(loss, tuple):
        total, count = loss
        return Part(total, count, kept)
    if getattr(criterion, "reduction", None) in ("sum", "none") or loss.dim() > 0:
        return Part(loss, None, kept)
    samples = _samples(target, output, dim)
    return Part(loss * samples, samples, kept)


def _has_classes(criterion: Any, target: Any) -> bool:
    known = isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss))
    return known and isinstance(target, Tensor) and not target.is_floating_point()


def _summing(criterion: nn.Module) -> Any:
    """The same criterion with sums in place of means. It shares all tensors."""
    summing: Any = copy.copy(criterion)
    summing.reduction = "sum"
    return summing


def _counted(criterion: Any, target: Tensor) -> Tensor:
    """The weights of all targets that are not ignored."""
    counted = target != criterion.ignore_index
    if criterion.weight is None:
        return counted.sum()
    weights = criterion.weight[torch.where(counted, target, 0)]
    return torch.where(counted, weights, 0).sum()


def _samples(target: Any, output: Any, dim: int) -> int:
    for _, leaf in leaves((target, output), ""):
        if isinstance(leaf, Tensor):
            if not is_whole(leaf):
                return leaf.shape[dim]
        elif isinstance(leaf, Samples):
            return len(leaf)
        elif (batch := batch_of(leaf)) is not None:
            return batch.size(leaf)
    return 1
