"""What surrounds the four stages of a call: refusals before them, and what is released after them.

`call.engine` enters a `Call` around the stages. ``torch.compile`` traces none of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.batches.chunk_sizes import Splits
from dataparallel.batches.scatter_gather import moved
from dataparallel.call.batch_split import BatchSplit
from dataparallel.call.parallel_apply import is_serial
from dataparallel.comm.streams.ahead import HostReads
from dataparallel.comm.streams.arrivals import LateCopies
from dataparallel.devices import current_device_set
from dataparallel.profiling import stage
from dataparallel.replicas.cycles import CycleBreaker
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.threads.balance import BalancedCall
from dataparallel.threads.settings import refuse_what_cannot_be_shared

R = TypeVar("R", bound=Sequence[nn.Module])

_of_thread = threading.local()
"""``call``: whose overridden stage this thread runs. Such a stage calls the wrapper's own by ``super()``, and the
signature of that is torch's, which has no place for the call."""


class Call:
    """A context around the stages of one call.

    When it ends without an error, activations and copies are freed, except what the output, ``kept`` or other code
    still holds. The stages are a function of their own, so their local variables are gone when the context ends. If the
    call fails, the traceback keeps them and this object alive. When it is dropped, the `CycleBreaker` takes circular
    replicas apart.

    However the call ends, the host then waits until no copy reads pinned memory of the caller. The copies wait for
    nothing that the devices compute.

    Args:
        slots: where replicas would run.
        kept: the store that makes or reuses the replicas; it is told how the call ends.
        serial: as in ``parallel_apply``. If replicas run one after the other, no copies of parameters are late: the
            computing streams wait for all of them before the first replica starts.
        may_use_source: true if code of the user runs between the stages, which may write to the source or step an
            optimizer. Then no copies are late either, because only lookups in replicas wait for those.
        split: how the form splits batches; ``None`` for near-equal chunks. It is told how a balanced call ends.

    Attributes:
        balanced: the split of this call, if it is balanced.
        reads: the copies that read pinned memory of the caller. The stage ``scatter`` notes them here.

    Raises:
        RuntimeError: several replicas cannot run here: see ``threads.settings.REFUSED``.
    """

    def __init__(
        self,
        slots: Sequence[torch.device],
        kept: KeptReplicas,
        serial: bool | None = None,
        may_use_source: bool = False,
        split: BatchSplit | None = None,
    ) -> None:
        if len(slots) > 1:
            refuse_what_cannot_be_shared()
        self.kept, self._split = kept, split
        self.balanced: BalancedCall | None = None
        self._breaker: CycleBreaker | None = None
        is_compiler_in_use = _torch.note_whether_compiler_is_in_use()
        self._copies = LateCopies(allowed=not (is_compiler_in_use or is_serial(serial) or may_use_source))
        self.reads = HostReads()

    @property
    def chunk_sizes(self) -> Splits | None:
        """What splits the batch of this call."""
        return self.balanced or (None if self._split is None else self._split.fixed)

    def known_to(self, overridden: Callable[..., Any]) -> Callable[..., Any]:
        """A stage that a subclass overrides. `call_of_this_thread` finds the call inside."""

        def run(*args: Any) -> Any:
            before = getattr(_of_thread, "call", None)
            _of_thread.call = self
            try:
                return overridden(*args)
            finally:
                _of_thread.call = before

        return run

    def replicates(self) -> AbstractContextManager[None]:
        """Around the stage ``replicate``, whose copies of parameters may be late. It is the only one."""
        return self._copies.may_begin()

    def uses(self, replicas: R) -> R:
        """Notes the replicas of this call, and returns them."""
        self._breaker = CycleBreaker([] if self.kept.is_frozen else replicas)
        return replicas

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _torch.note_whether_compiler_is_in_use()  # before the next call, torch may be told to forget what was compiled
        failed = True
        try:
            self._copies.wait_for_copies()  # first: what follows frees memory
            failed = kind is not None
        finally:
            try:
                self._release_replicas(failed)
            finally:
                self.reads.wait_for_copies()
                if self._split is not None:
                    self._split.end_call(self.balanced, kind is not None)

    def _release_replicas(self, failed: bool) -> None:
        if self._breaker is None:  # there are no replicas
            return
        if failed:
            self.kept.forget_last_call()
            return
        self._breaker.take_apart()
        self.kept.end_call()


def call_of_this_thread(kept: KeptReplicas) -> Call | None:
    """The call whose overridden stage this thread runs, if its replicas come from ``kept``."""
    call: Call | None = getattr(_of_thread, "call", None)
    return call if call is not None and call.kept is kept else None


def run_alone(
    run: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    slot: torch.device,
    output_device: torch.device,
) -> Any:
    """Runs ``run`` on the only slot, which needs no replica. The output is moved to ``output_device``."""
    with stage("parallel_apply"), current_device_set(slot):
        output = run(*inputs, **kwargs)
    return output if output_device == slot else moved(output, output_device)
