"""What surrounds the four stages of a call: whether it may run here, a single slot, and how its replicas end.

The stages themselves, scatter -> replicate -> parallel_apply -> gather, are four calls in a row in ``data_parallel``
and in the composable forms. Each of these runs them inside a `Call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dataparallel.devices import current_device_set
from dataparallel.modules.cycles import CycleBreaker
from dataparallel.scatter_gather import moved
from dataparallel.threads.settings import refuse_what_cannot_be_shared

__all__ = ["Call", "Keeper", "run_alone"]

R = TypeVar("R", bound=Sequence[nn.Module])


class Keeper(Protocol):
    """Keeps replicas from call to call, as ``kept.replicas.KeptReplicas`` does."""

    @property
    def is_frozen(self) -> bool:
        """Whether replicas stay as they are when the call ends."""

    def end_call(self) -> None:
        """The call has ended, and its outputs are gathered."""

    def forget_last_call(self) -> None:
        """The call has failed."""


class Call:
    """A context around the stages of one call. When it ends nothing but the output may hold what the stages used.

    So the stages are a function of their own, whose local variables are gone by then. After a failure they live as long
    as the traceback does; the object, which the frames hold, then takes circular replicas apart.

    Args:
        slots: where replicas would run.
        keeper: is told how the call ends.

    Raises:
        RuntimeError: several replicas cannot run here: see ``threads.settings.REFUSED``.
    """

    def __init__(self, slots: Sequence[torch.device], keeper: Keeper) -> None:
        if len(slots) > 1:
            refuse_what_cannot_be_shared()
        self._keeper = keeper
        self._breaker: CycleBreaker | None = None

    def uses(self, replicas: R) -> R:
        """Notes the replicas of this call, and returns them."""
        self._breaker = CycleBreaker([] if self._keeper.is_frozen else replicas)
        return replicas

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if self._breaker is None:
            return
        if kind is not None:
            self._keeper.forget_last_call()
            return
        self._breaker.take_apart()
        self._keeper.end_call()


def run_alone(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    slot: torch.device,
    output_device: torch.device,
) -> Any:
    """The output of ``run`` on the only slot, which needs no replica, moved to ``output_device``."""
    with current_device_set(slot):
        output = run(*inputs, **kwargs)
    return output if output_device == slot else moved(output, output_device)
