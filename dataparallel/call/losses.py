"""`ReplicaLoss`, the ``loss=`` option: each replica computes the loss of its chunk, and only scalars are gathered.

The loss of the batch is the sum of the chunks' totals divided by the sum of their weights: see `ChunkLoss`.
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

from dataparallel.batches.structures import number_of_samples
from dataparallel.replicas.placement import check_placement
from dataparallel.replicas.replicate import make_replicas

Criterion = Callable[[Any, Any], Any]

TARGET, OUTPUTS = "target", "outputs"


class ChunkLoss(NamedTuple):
    """The loss of a chunk: ``total / weight``, or ``total`` alone if ``weight`` is ``None``."""

    total: Any
    weight: Any
    output: Any


class ReplicaLoss:
    """The criterion of a form. The class of the criterion decides how the losses of chunks become the batch's loss.

    ============================================  =====================================================================
    the criterion                                 the weight of a chunk
    ============================================  =====================================================================
    ``reduction="none"``                          none: losses are gathered as outputs are
    ``reduction="sum"``                           none: losses are added
    ``CrossEntropyLoss``, ``NLLLoss`` of classes  the sum of the class weights of its targets, except ignored ones
    returns ``(total, count)``                    ``count``
    any other                                     the number of its samples: the loss of a chunk is a mean over them
    ============================================  =====================================================================

    Args:
        criterion: ``criterion(output, target)`` returns a tensor, or a pair of a total and a count.
        module: the module that the form wraps.

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

    def begin_call(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], CallLoss | None]:
        """Returns ``kwargs`` without ``outputs``, and the call's loss; ``None`` if the call has no ``target``.

        Raises:
            TypeError: ``outputs`` without ``target``.
        """
        if TARGET in kwargs:
            without_outputs = {name: value for name, value in kwargs.items() if name != OUTPUTS}
            return without_outputs, CallLoss(self.criterion, bool(kwargs.get(OUTPUTS)))
        if OUTPUTS in kwargs:
            raise TypeError("outputs= goes with target=: without a target the call returns outputs anyway")
        return kwargs, None


class CallLoss:
    """The loss of one call. With ``with_outputs`` the call returns outputs too."""

    def __init__(self, criterion: Criterion, with_outputs: bool) -> None:
        self._criterion, self._with_outputs = criterion, with_outputs

    def loss_functions(
        self, slots: Sequence[torch.device], kwargs: Sequence[dict[str, Any]], dim: int, cap_bytes: int
    ) -> list[Callable[[Any], ChunkLoss]]:
        """Returns for each slot a function of the replica's output. Removes ``target`` from each slot's ``kwargs``.

        Raises:
            RuntimeError: a tensor of the criterion is not on the first slot.
        """
        criteria: Sequence[Any] = [self._criterion] * len(slots)
        if isinstance(self._criterion, nn.Module) and _has_tensors(self._criterion):
            check_placement(self._criterion, slots[0])
            criteria = make_replicas(self._criterion, [*slots], cap_bytes)
        return [
            partial(_chunk_loss, criterion, slot_kwargs.pop(TARGET), dim, self._with_outputs)
            for criterion, slot_kwargs in zip(criteria, kwargs, strict=True)
        ]

    def without_replicas(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that calls ``run``, the plain module, and returns the loss of its output."""

        def run_with_loss(*inputs: Any, **kwargs: Any) -> Any:
            target = kwargs.pop(TARGET)
            output = run(*inputs, **kwargs)
            loss = self._criterion(output, target)
            if isinstance(loss, tuple):
                total, weight = loss
                loss = total / weight
            return (loss, output) if self._with_outputs else loss

        return run_with_loss

    def loss_of_batch(
        self,
        chunks: Sequence[ChunkLoss],
        gather: Callable[[list[Any]], Any],
        gather_outputs: Callable[[list[Any]], Any],
    ) -> Any:
        """Returns the batch's loss on the output device, in a pair with the gathered outputs if the call wants them."""
        loss = gather([chunk.total for chunk in chunks])
        if chunks[0].weight is not None:
            weights = [chunk.weight for chunk in chunks]
            loss = loss.sum() / (gather(weights).sum() if isinstance(weights[0], Tensor) else sum(weights))
        elif chunks[0].total.dim() == 0:
            loss = loss.sum()
        return (loss, gather_outputs([chunk.output for chunk in chunks])) if self._with_outputs else loss


def _has_tensors(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _chunk_loss(criterion: Any, target: Any, dim: int, with_output: bool, output: Any) -> ChunkLoss:
    """Computes the loss of a chunk in the thread of its replica."""
    kept_output = output if with_output else None
    if getattr(criterion, "reduction", None) == "mean" and _has_class_targets(criterion, target):
        total = _with_sum_reduction(criterion)(output, target)
        return ChunkLoss(total, _weight_of_targets(criterion, target).to(total.dtype), kept_output)
    loss = criterion(output, target)
    if isinstance(loss, tuple):
        total, weight = loss
        return ChunkLoss(total, weight, kept_output)
    if getattr(criterion, "reduction", None) in ("sum", "none") or loss.dim() > 0:
        return ChunkLoss(loss, None, kept_output)
    samples = number_of_samples((target, output), dim)
    return ChunkLoss(loss * samples, samples, kept_output)


def _has_class_targets(criterion: Any, target: Any) -> bool:
    takes_classes = isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss))
    return takes_classes and isinstance(target, Tensor) and not target.is_floating_point()


def _with_sum_reduction(criterion: nn.Module) -> Any:
    """Returns a shallow copy of the criterion with ``reduction="sum"``."""
    copied: Any = copy.copy(criterion)
    copied.reduction = "sum"
    return copied


def _weight_of_targets(criterion: Any, target: Tensor) -> Tensor:
    """Returns the sum of the class weights of all targets, except ignored ones."""
    is_used = target != criterion.ignore_index
    if criterion.weight is None:
        return is_used.sum()
    weights = criterion.weight[torch.where(is_used, target, 0)]
    return torch.where(is_used, weights, 0).sum()
