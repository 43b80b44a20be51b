"""The four stages in a row, for whoever has them: scatter -> replicate -> parallel_apply -> gather.

What a stage does is its caller's to say: ``data_parallel`` has them as methods that can be overridden, the composable
forms bring replicas of their own. Here is what all have in common: the order, the ranges in a profile, a single slot,
which needs no replica, and what becomes of replicas when the call ends or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dataparallel.devices import on
from dataparallel.ranges import stage
from dataparallel.replica_cycles import CycleBreaker
from dataparallel.scatter_gather import moved
from dataparallel.thread_state import refuse_what_cannot_be_shared

__all__ = ["Keeper", "run_stages"]


class Keeper(Protocol):
    """Keeps replicas for one call after the other, as ``kept_replicas.KeptReplicas`` does."""

    @property
    def is_frozen(self) -> bool:
        """Whether replicas stay as they are when the call ends."""

    def end_call(self) -> None:
        """The call has ended, its outputs are gathered."""

    def forget_last_call(self) -> None:
        """The call has failed."""


def run_stages(
    slots: Sequence[torch.device],
    output_device: torch.device,
    alone: Callable[..., Any],
    *,
    scatter: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
    replicate: Callable[[int], Sequence[Any]],
    parallel_apply: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]],
    gather: Callable[[list[Any]], Any],
    keeper: Keeper,
) -> Any:
    """One call.

    Args:
        slots: one or more.
        output_device: where the output goes that a single slot has computed.
        alone: what a single slot runs instead of a replica, with positional and keyword arguments.
        scatter: returns positional and keyword arguments for each slot; none if there is nothing to scatter.
        replicate: from the number of slots that have inputs to their replicas.
        parallel_apply: from replicas, positional and keyword arguments to outputs.
        gather: from outputs to one.
        keeper: is told how the call ends.

    Raises:
        RuntimeError: several replicas cannot run here: see ``thread_state.REFUSED``.
        Exception: what a stage or a replica raised.
    """
    if len(slots) > 1:
        refuse_what_cannot_be_shared()
    with stage("scatter"):
        inputs, kwargs = scatter()
    if not inputs and not kwargs:
        inputs, kwargs = ((),), ({},)
    if len(slots) == 1:
        with on(slots[0]):
            output = alone(*inputs[0], **kwargs[0])
        return output if output_device == slots[0] else moved(output, output_device)
    with stage("replicate"):
        replicas = replicate(len(inputs))
    breaker = CycleBreaker([] if keeper.is_frozen else replicas)
    try:
        with stage("parallel_apply"):
            outputs = parallel_apply(replicas, inputs, kwargs)
        with stage("gather"):
            gathered = gather(outputs)
    except BaseException:
        # Only its frames hold what the failed call has used then.
        keeper.forget_last_call()
        raise
    del replicas, outputs
    breaker.take_apart()
    keeper.end_call()
    return gathered
