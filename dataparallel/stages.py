"""What surrounds the four stages of a call.

It refuses states that threads cannot share, releases the replicas, and makes the call on a single slot. The stages,
scatter -> replicate -> parallel_apply -> gather, are four calls in a row in ``data_parallel`` and in
``composable.replicate_state``. They make them inside a `Call`. Their ``_run`` checks placement first.
``torch.compile`` traces none of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from dataparallel import _torch
from dataparallel.devices import current_device_set
from dataparallel.kept.replicas import KeptReplicas
from dataparallel.modules.cycles import CycleBreaker
from dataparallel.parallel_apply import is_serial
from dataparallel.profiling import stage
from dataparallel.scatter_gather import moved
from dataparallel.streams.ahead import HostReads
from dataparallel.streams.arrivals import LateCopies
from dataparallel.threads.settings import refuse_what_cannot_be_shared

__all__ = ["Call", "reads_of_this_scatter", "run_alone"]

R = TypeVar("R", bound=Sequence[nn.Module])

_scattering = threading.local()
"""``reads``: the `HostReads` of the call that is in its stage ``scatter`` in this thread."""


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

    Attributes:
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
    ) -> None:
        if len(slots) > 1:
            refuse_what_cannot_be_shared()
        self._kept = kept
        self._breaker: CycleBreaker | None = None
        # Asked in every call, also where nothing may be late: before the next call, torch may be told to forget what it
        # has compiled.
        is_compiler_in_use = _torch.is_compiler_in_use()
        self._copies = LateCopies(allowed=not (is_compiler_in_use or is_serial(serial) or may_use_source))
        self.reads = HostReads()

    @contextmanager
    def scatters(self) -> Iterator[None]:
        """Around a stage ``scatter`` that does not know the call: `reads_of_this_scatter` finds the call's reads."""
        before = getattr(_scattering, "reads", None)
        _scattering.reads = self.reads
        try:
            yield
        finally:
            _scattering.reads = before

    def replicates(self) -> AbstractContextManager[None]:
        """Around the stage ``replicate``, whose copies of parameters may be late. It is the only one."""
        return self._copies.may_begin()

    def uses(self, replicas: R) -> R:
        """Notes the replicas of this call, and returns them."""
        self._breaker = CycleBreaker([] if self._kept.is_frozen else replicas)
        return replicas

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _torch.is_compiler_in_use()  # it remembers what forward has compiled
        failed = True
        try:
            self._copies.end()  # first: what follows frees memory
            failed = kind is not None
        finally:
            try:
                self._release_replicas(failed)
            finally:
                self.reads.wait()

    def _release_replicas(self, failed: bool) -> None:
        if self._breaker is None:  # there are no replicas
            return
        if failed:
            self._kept.forget_last_call()
            return
        self._breaker.take_apart()
        self._kept.end_call()


@contextmanager
def reads_of_this_scatter() -> Iterator[HostReads]:
    """For a scatter: the reads of the call whose stage it is. Outside of a call they end with the block."""
    reads = getattr(_scattering, "reads", None)
    if reads is not None:
        yield reads
        return
    with HostReads() as reads:
        yield reads


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
