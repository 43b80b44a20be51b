"""What surrounds the four stages of a call: the check before them, the end of its replicas, and the single slot.

The stages, scatter -> replicate -> parallel_apply -> gather, are four calls in a row in ``data_parallel`` and in the
composable forms. Each of these makes them inside a `Call`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.devices import current_device_set
from dataparallel.kept.replicas import KeptReplicas
from dataparallel.modules.cycles import CycleBreaker
from dataparallel.scatter_gather import moved
from dataparallel.threads.settings import refuse_what_cannot_be_shared

__all__ = ["Call", "between_graphs", "run_alone"]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound=Sequence[nn.Module])


def between_graphs(function: F) -> F:
    """Decorates a function that ``torch.compile`` does not trace: it runs between the graphs of its caller."""
    not_traced = _torch.between_graphs(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Without a compiler the plain function does: the other one would import it.
        return not_traced(*args, **kwargs) if _torch.is_compiler_loaded() else function(*args, **kwargs)

    return cast(F, run)


class Call:
    """A context around the stages of one call. At its end nothing but the output holds anything that they used.

    The stages are therefore a function of their own: its local variables are gone before the context ends. If the call
    fails, they live as long as the traceback, and so does this object, which then takes circular replicas apart.

    Args:
        slots: where replicas would run.
        kept: where the replicas come from; it is told how the call ends.

    Raises:
        RuntimeError: several replicas cannot run here: see ``threads.settings.REFUSED``.
    """

    def __init__(self, slots: Sequence[torch.device], kept: KeptReplicas) -> None:
        if len(slots) > 1:
            refuse_what_cannot_be_shared()
        self._kept = kept
        self._breaker: CycleBreaker | None = None

    def uses(self, replicas: R) -> R:
        """Notes the replicas of this call, and returns them."""
        self._breaker = CycleBreaker([] if self._kept.is_frozen else replicas)
        return replicas

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if self._breaker is None:  # there are no replicas
            return
        if kind is not None:
            self._kept.forget_last_call()
            return
        self._breaker.take_apart()
        self._kept.end_call()


def run_alone(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    slot: torch.device,
    output_device: torch.device,
) -> Any:
    """Runs ``run`` on the only slot, which needs no replica. The output is moved to ``output_device``."""
    with current_device_set(slot):
        output = run(*inputs, **kwargs)
    return output if output_device == slot else moved(output, output_device)
