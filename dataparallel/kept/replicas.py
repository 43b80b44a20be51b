"""Makes the replicas of one call after another, and keeps what the next call can use again.

It keeps the module objects of plain trees (``kept.shell``) and, while no graph is recorded, copies of the tensors
(``kept.tensors``). Each call sees the source as it is then, and nothing that ``forward`` did to the replicas of the
last call. Values are sent at every call, because a write through ``.data`` leaves no trace. Only inside ``frozen``
replicas stay as they are and nothing is sent (``kept.frozen``). An object that is replaced in the source, a parameter
for example, is held here until the next call.

An object that somebody else still holds (a call in another thread, a parameter that ``forward`` returned, a replica
that a hook stored) is left to its holder and a new one is made. ``ownership`` tells; if reference counts are not
trusted, each call outside of ``frozen`` has its own replicas and copies. Each wrapper, and each module that the
composable forms replicate, has a `KeptReplicas`. ``replicate`` is the stage that keeps nothing.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dataparallel import ownership
from dataparallel.compiled.argument import CompileArgument
from dataparallel.forks import in_forked_child
from dataparallel.kept.frozen import FrozenSet
from dataparallel.kept.shell import Shell
from dataparallel.kept.tensors import KeptCopies
from dataparallel.modules.build import build_replica, collector_paused, make_parameters
from dataparallel.modules.cycles import CycleBreaker
from dataparallel.modules.plan import ModulePlan
from dataparallel.modules.scripts import refuse_constants
from dataparallel.modules.snapshot import TreeSnapshot
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicate import build_replicas, copy_tensors
from dataparallel.streams.arrivals import Arrivals, arrivals_for

__all__ = ["MOST_FROZEN", "CallTensors", "KeptReplicas"]

MOST_FROZEN = 4
"""The number of sets of replicas that one ``frozen`` block keeps: one for each call that runs at the same time.

Further calls make replicas that are not kept.
"""

_all: weakref.WeakSet[KeptReplicas] = weakref.WeakSet()


class CallTensors(Protocol):
    """Makes the tensors of a call's replicas, for one call at a time. A copy of it holds no tensors."""

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        """The plan's tensors for each slot, with their values now.

        ``record``: a graph is recorded. ``arrivals``: parameters may still be on their way, and this launches them.
        """

    def end_call(self) -> None:
        """Removes everything that the last call left on kept tensors."""

    def forget_last_call(self) -> None:
        """Drops the tensors of the last call, which has failed."""

    def clear(self) -> None:
        """Drops everything."""


class _NewOrKeptTensors:
    """New tensors for a call that records a graph, kept copies for other calls."""

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[_NewOrKeptTensors], tuple[()]]:
        return _NewOrKeptTensors, ()

    def clear(self) -> None:
        self._copies = KeptCopies()

    def for_call(
        self,
        plan: ModulePlan,
        slots: list[torch.device],
        cap_bytes: int,
        record: bool,
        arrivals: Arrivals | None = None,
    ) -> list[list[Tensor]]:
        if not record:
            return self._copies.refreshed(plan, slots, cap_bytes, arrivals)
        self.clear()  # training needs the memory
        copies = copy_tensors(plan, slots, True, cap_bytes, arrivals)
        for tensors in copies:
            make_parameters(plan, tensors, ReplicaParameter)
        return copies

    def end_call(self) -> None:
        self._copies.end_call()

    def forget_last_call(self) -> None:
        self.clear()


class KeptReplicas:
    """The replicas that one wrapper keeps: at most one for each slot, inside ``frozen`` `MOST_FROZEN` for each slot.

    Any thread may use it. A copy of it, and an unpickled one, is empty.

    Args:
        tensors: makes the replicas' tensors outside of ``frozen``. Default: new ones for each call that records a
            graph, kept copies for others.
        compile: how replicas are compiled, if their module is not compiled itself.
    """

    def __init__(self, tensors: CallTensors | None = None, compile: CompileArgument | None = None) -> None:
        self._tensors = _NewOrKeptTensors() if tensors is None else tensors
        self._compile = compile
        self._lock = threading.Lock()
        self._frozen = 0  # open blocks
        self._clear()
        _all.add(self)

    def __reduce__(self) -> tuple[type[KeptReplicas], tuple[CallTensors, CompileArgument | None]]:
        return KeptReplicas, (copy.copy(self._tensors), self._compile)

    def _plan_of(self, network: nn.Module) -> ModulePlan:
        return ModulePlan.of(network, None if self._compile is None else self._compile.of(network))

    def _clear(self) -> None:
        self._plan: ModulePlan | None = None
        self._snapshot: TreeSnapshot | None = None
        self._shells: list[Shell] = []
        self._frozen_sets: list[FrozenSet] = []
        self._is_from_before_fork = False  # everything kept was made by the parent process
        self._tensors.clear()

    @property
    def is_frozen(self) -> bool:
        """True while a ``frozen`` block is open."""
        return self._frozen > 0

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._clear()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A block in which replicas stay as they are. Blocks may be nested."""
        self._freeze()
        try:
            yield
        finally:
            self._thaw()

    def _freeze(self) -> None:
        with self._lock:
            self._frozen += 1
            if self._frozen == 1:
                self._clear()

    def _thaw(self) -> None:
        with self._lock:
            self._frozen -= 1
            if self._frozen:
                return
            breaker = CycleBreaker([replica for kept in self._frozen_sets for replica in kept.replicas])
            self._clear()
        breaker.take_apart()

    def replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        """Replicas for ``slots``, as `dataparallel.replicate` makes them.

        Raises:
            RuntimeError: the tree cannot be replicated, the message names the module; or a graph is recorded inside
                `frozen`.
        """
        record = torch.is_grad_enabled()
        with self._lock:
            if self.is_frozen and record:
                raise RuntimeError(
                    "inside model.frozen() replicas stay as they are and no gradient leads back to the module; call "
                    "the model under torch.no_grad() or torch.inference_mode(), or outside of frozen()"
                )
            try:
                if self._is_from_before_fork:
                    self._clear()
                with collector_paused():
                    if self.is_frozen:
                        return self._frozen_replicas(network, slots, cap_bytes)
                    return self._refreshed_replicas(network, slots, cap_bytes, record)
            except BaseException:
                self._clear()  # it may be half-made
                raise

    def end_call(self) -> None:
        """Removes everything that the last call left on kept replicas, activations for example."""
        with self._lock:
            self._reset()
            self._tensors.end_call()

    def forget_last_call(self) -> None:
        """Drops the replicas of the last call, which has failed."""
        with self._lock:
            self._shells = []
            self._tensors.forget_last_call()

    def _frozen_replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        for kept in self._frozen_sets:
            if kept.is_free() and kept.serves(network, slots):
                return kept.lease(len(slots))
        plan = self._plan_of(network)
        refuse_constants(plan, slots)
        copies = KeptCopies().refreshed(plan, slots, cap_bytes)
        made = FrozenSet(network, slots, [build_replica(plan, tensors, record=False) for tensors in copies])
        # A set of fewer slots was made for a smaller batch. It is dropped if the new set serves its calls too.
        self._frozen_sets = [kept for kept in self._frozen_sets if not (kept.is_free() and kept.is_part_of(made))]
        if len(self._frozen_sets) < MOST_FROZEN:
            self._frozen_sets.append(made)
        return made.lease(len(slots))

    def _refreshed_replicas(
        self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool
    ) -> list[Any]:
        self._reset()
        if self._plan is None or self._snapshot is None or not self._snapshot.still_holds(network):
            self._shells = []
            self._plan = self._plan_of(network)
            self._snapshot = TreeSnapshot(self._plan) if self._plan.is_plain else None
        plan = self._plan
        refuse_constants(plan, slots)
        arrivals = arrivals_for(slots, plan.tensors)
        copies = self._tensors.for_call(plan, slots, cap_bytes, record, arrivals)
        if self._snapshot is None:
            self._plan = None
        if self._snapshot is None or not ownership.are_counts_trusted():
            return build_replicas(plan, copies, record, arrivals)
        may_be_late = arrivals is not None
        if any(shell.may_be_late != may_be_late for shell in self._shells):
            self._shells = []
        while len(self._shells) < len(slots):
            self._shells.append(Shell(plan, may_be_late))
        return [
            shell.filled(tensors, arrivals, slot)
            for slot, (shell, tensors) in enumerate(zip(self._shells, copies, strict=False))
        ]

    def _reset(self) -> None:
        if not all([shell.reset() for shell in self._shells]):
            self._shells = []


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Replaces locks, which another thread may have held at the fork, and has kept replicas dropped at the next call.

    They are not dropped here: that may add gradients, and torch does not know yet that its threads are gone.
    """
    for kept in _all:
        kept._lock = threading.Lock()
        kept._is_from_before_fork = True
