"""`KeptReplicas` makes the replicas of each call, and keeps what the next call can use again.

Replicas get the module objects of the last call (``kept_modules``) and tensors from the form's store
(``kept_tensors``). Each call sees the source as it is then, and nothing that ``forward`` did to earlier replicas.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from dataparallel import ownership
from dataparallel._torch import HOOK_TABLES
from dataparallel.comm.streams.arrivals import arrivals_for
from dataparallel.comm.streams.current import current_streams
from dataparallel.forks import in_forked_child
from dataparallel.replicas.build import build_replica, collector_paused
from dataparallel.replicas.compiled.calls import CompileArgument
from dataparallel.replicas.kept_modules import CycleBreaker, ReplicaModules, TreeSnapshot
from dataparallel.replicas.kept_tensors import KeptCopies, ReplicaTensors
from dataparallel.replicas.placement import refuse_script_constants
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.replicate import build_replicas

MOST_FROZEN = 4
"""One ``frozen`` block keeps at most so many sets of replicas: one for each call that runs at the same time.

If more calls run at the same time, their replicas are not kept.
"""

_all: weakref.WeakSet[KeptReplicas] = weakref.WeakSet()


class KeptReplicas:
    """Keeps the replicas of one wrapper or module: at most one for each slot, or `MOST_FROZEN` inside ``frozen``.

    Each call sends all values, because a write through ``.data`` leaves no trace. Only inside ``frozen`` replicas stay
    as they are and nothing is sent. An object that is replaced in the source is held here until the next call. An
    object that other code still holds (a call in another thread, a parameter that ``forward`` returned, a replica that
    a hook stored) is left to its holder and a new one is made. ``ownership`` finds such holders. If reference counts
    are not trusted, each call outside of ``frozen`` has its own module objects.

    Any thread may use it. Copying or unpickling gives an empty `KeptReplicas`.

    Args:
        tensors: lends the replicas' tensors outside of ``frozen``.
        compile: how replicas are compiled, if their module is not compiled itself.
    """

    def __init__(self, tensors: ReplicaTensors | None = None, compile: CompileArgument | None = None) -> None:
        self._tensors = KeptCopies() if tensors is None else tensors
        self._compile = compile
        self._lock = threading.Lock()
        self._frozen_blocks = 0  # how many are open
        self._clear()
        _all.add(self)

    def __reduce__(self) -> tuple[type[KeptReplicas], tuple[ReplicaTensors, CompileArgument | None]]:
        return KeptReplicas, (copy.copy(self._tensors), self._compile)

    def _make_plan(self, network: nn.Module) -> ModulePlan:
        return ModulePlan.of(network, None if self._compile is None else self._compile.of(network))

    def _clear(self) -> None:
        self._snapshot: TreeSnapshot | None = None  # ``None`` if the tree is not plain
        self._modules: list[ReplicaModules] = []
        self._frozen_sets: list[_FrozenSet] = []
        self._is_from_before_fork = False  # the parent process has made everything that is kept
        self._tensors.clear()

    @property
    def is_frozen(self) -> bool:
        """True while a ``frozen`` block is open."""
        return self._frozen_blocks > 0

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._clear()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A block in which replicas stay as they are. Blocks may be nested."""
        with self._lock:
            self._frozen_blocks += 1
            if self._frozen_blocks == 1:
                self._clear()
        try:
            yield
        finally:
            self._end_frozen_block()

    def _end_frozen_block(self) -> None:
        with self._lock:
            self._frozen_blocks -= 1
            if self._frozen_blocks:
                return
            breaker = CycleBreaker([replica for kept in self._frozen_sets for replica in kept.replicas])
            self._clear()
        breaker.take_apart()

    def replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        """Returns replicas for ``slots``, as `dataparallel.replicate` makes them.

        Raises:
            RuntimeError: the tree cannot be replicated; the message names the module. A call inside `frozen` records a
                graph.
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
                self._clear()  # kept objects may be half-made
                raise

    def end_call(self) -> None:
        """Removes everything that the last call left on kept replicas, activations for example."""
        with self._lock:
            self._reset_modules()
            self._tensors.end_call()

    def forget_last_call(self) -> None:
        """Drops the replicas of the last call, which has failed."""
        with self._lock:
            self._modules = []
            self._tensors.forget_last_call()

    def _frozen_replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        for kept in self._frozen_sets:
            if kept.is_free() and kept.serves(network, slots):
                return kept.lease(len(slots))
        plan = self._make_plan(network)
        refuse_script_constants(plan, slots)
        copies = KeptCopies().refreshed(plan, slots, cap_bytes)
        new_set = _FrozenSet(network, slots, [build_replica(plan, tensors, record=False) for tensors in copies])
        # A set for fewer slots was made for a smaller batch. It is dropped if the new set serves its calls too.
        self._frozen_sets = [kept for kept in self._frozen_sets if not (kept.is_free() and kept.is_covered_by(new_set))]
        if len(self._frozen_sets) < MOST_FROZEN:
            self._frozen_sets.append(new_set)
        return new_set.lease(len(slots))

    def _refreshed_replicas(
        self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool
    ) -> list[Any]:
        self._reset_modules()
        if self._snapshot is not None and self._snapshot.still_holds(network):
            plan = self._snapshot.plan
        else:
            self._modules, self._snapshot = [], None
            plan = self._make_plan(network)
            self._snapshot = TreeSnapshot(plan) if plan.is_plain else None
        refuse_script_constants(plan, slots)
        arrivals = arrivals_for(slots, plan.tensors)
        copies = self._tensors.for_call(plan, slots, cap_bytes, record, arrivals)
        if self._snapshot is None or not ownership.are_counts_trusted():
            return build_replicas(plan, copies, record, arrivals)
        may_be_late = arrivals is not None
        if any(modules.may_be_late != may_be_late for modules in self._modules):
            self._modules = []
        while len(self._modules) < len(slots):
            self._modules.append(ReplicaModules(plan, may_be_late))
        return [
            modules.fill(tensors, arrivals, slot)
            for slot, (modules, tensors) in enumerate(zip(self._modules, copies, strict=False))
        ]

    def _reset_modules(self) -> None:
        if not all([modules.reset() for modules in self._modules]):
            self._modules = []


class _Lease(list[Any]):
    """The replicas of one call. Other calls use them only after this list is deleted."""

    __slots__ = ("__weakref__",)


class _FrozenSet:
    """A set of replicas inside ``frozen``, leased to one call at a time.

    The lease ends with the call, even if other code holds one of the replicas longer.
    """

    def __init__(self, network: nn.Module, slots: list[torch.device], replicas: list[Any]) -> None:
        self.replicas = replicas
        self._network, self._slots = network, slots
        # Only these streams are ordered after the copies that made the set, and before its memory is used again.
        self._streams = current_streams(slots)
        self._hooks = _hook_tables(network)
        self._leased: weakref.ref[_Lease] | None = None

    def serves(self, network: nn.Module, slots: list[torch.device]) -> bool:
        """True if a call of ``network`` on ``slots`` and on the current streams may use the set."""
        return self._fits(network, _hook_tables(network), slots, current_streams(slots))

    def is_covered_by(self, other: _FrozenSet) -> bool:
        """True if ``other`` serves every call that this set serves."""
        return other._fits(self._network, self._hooks, self._slots, self._streams)

    def _fits(
        self,
        network: nn.Module,
        hooks: list[Any],
        slots: list[torch.device],
        streams: dict[torch.device, torch.Stream],
    ) -> bool:
        return (
            network is self._network
            and all(map(is_, hooks, self._hooks))
            and self._slots[: len(slots)] == slots
            and streams.items() <= self._streams.items()
        )

    def is_free(self) -> bool:
        """True if no call has leased the set."""
        return self._leased is None or self._leased() is None

    def lease(self, count: int) -> _Lease:
        """Returns the first ``count`` replicas. The set is leased until the returned list is deleted."""
        lease = _Lease(self.replicas[:count])
        self._leased = weakref.ref(lease)
        return lease


def _hook_tables(network: nn.Module) -> list[Any]:
    """Returns the hook tables of the root. Of a twin, ``forward`` uses other tables than other methods do."""
    return [vars(network).get(name) for name in HOOK_TABLES]


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Replaces locks, which another thread may have held at the fork. The next call drops the parent's replicas.

    Replicas are not dropped here: this may add gradients, and torch does not know yet that its threads are gone.
    """
    for kept in _all:
        kept._lock = threading.Lock()
        kept._is_from_before_fork = True
