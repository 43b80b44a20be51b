"""Replicas for one call after the other: what can be used again is kept.

Kept are the module objects of plain trees, which get their attributes anew, and while no graph is recorded copies of
the tensors (``kept.tensors``). Every call still sees whatever the source is then, and nothing of what ``forward`` did
to the replicas of the last call. Values are sent again each time, because a write through ``.data`` leaves no trace
that could be asked for. Only inside ``frozen`` replicas stay as they are, and nothing is sent. What has been replaced
in the source, a parameter for example, lives on until the next call.

Nobody has to say when a call is over: what somebody else still holds (a call that runs in another thread, a
parameter that ``forward`` returned, a replica that a hook has stored) is left to them and made again. ``ownership``
tells; where it cannot, each call outside of ``frozen`` has replicas and copies of its own. Sets inside ``frozen`` are
leased instead. How fresh replicas are made is ``replicate``'s business; ``data_parallel`` owns a `KeptReplicas` for
each wrapper.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dataparallel import ownership
from dataparallel.forks import in_forked_child
from dataparallel.kept.frozen import FrozenSet
from dataparallel.kept.shell import Shell
from dataparallel.kept.tensors import KeptCopies
from dataparallel.modules.build import build_replica, collector_paused, make_parameters
from dataparallel.modules.cycles import CycleBreaker
from dataparallel.modules.plan import ModulePlan
from dataparallel.modules.snapshot import TreeSnapshot
from dataparallel.profiling import in_stage
from dataparallel.replica_parameter import ReplicaParameter
from dataparallel.replicate import copy_tensors

__all__ = ["MOST_FROZEN", "CallTensors", "KeptReplicas"]

MOST_FROZEN = 4
"""How many sets of replicas stay in one `frozen`: one for each call that runs at a time. Further calls make theirs."""


_all: weakref.WeakSet[KeptReplicas] = weakref.WeakSet()


class CallTensors(Protocol):
    """Where the replicas of a call get their tensors from; asked for one call at a time. Copies of it are empty."""

    def for_call(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, record: bool) -> list[list[Tensor]]:
        """The plan's tensors for each slot, with the values of now; ``record``: whether a graph is recorded."""

    def end_call(self) -> None:
        """Takes from what is kept all that the last call has left on it."""

    def forget_last_call(self) -> None:
        """Leaves what the last call, which has failed, has used to whoever still holds it."""

    def clear(self) -> None:
        """Lets go of everything."""


class _NewOrKept:
    """New tensors where a graph is recorded, kept copies where none is."""

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[type[_NewOrKept], tuple[()]]:
        return _NewOrKept, ()

    def clear(self) -> None:
        self._copies = KeptCopies()

    def for_call(self, plan: ModulePlan, slots: list[torch.device], cap_bytes: int, record: bool) -> list[list[Tensor]]:
        if not record:
            return self._copies.refreshed(plan, slots, cap_bytes)
        self.clear()  # a training needs the memory
        copies = copy_tensors(plan, slots, True, cap_bytes)
        for tensors in copies:
            make_parameters(plan, tensors, ReplicaParameter)
        return copies

    def end_call(self) -> None:
        self._copies.end_call()

    def forget_last_call(self) -> None:
        self.clear()


class KeptReplicas:
    """What one wrapper keeps: at most a copy of the module for each slot, inside `frozen` `MOST_FROZEN` of them.

    It is for any thread. Copies of it, and what is unpickled, are empty.

    Args:
        tensors: where replicas get their tensors from, but inside `frozen`; default: new ones for each call that
            records a graph, kept copies for others.
    """

    def __init__(self, tensors: CallTensors | None = None) -> None:
        self._tensors = _NewOrKept() if tensors is None else tensors
        self._lock = threading.Lock()
        self._frozen = 0  # open blocks
        self._clear()
        _all.add(self)

    def __reduce__(self) -> tuple[type[KeptReplicas], tuple[CallTensors]]:
        return KeptReplicas, (copy.copy(self._tensors),)

    def _clear(self) -> None:
        self._plan: ModulePlan | None = None
        self._snapshot: TreeSnapshot | None = None
        self._shells: list[Shell] = []
        self._frozen_sets: list[FrozenSet] = []
        self._is_of_a_parent = False  # what is kept was made in the process from which this one was forked
        self._tensors.clear()

    @property
    def is_frozen(self) -> bool:
        """Whether a block is open."""
        return self._frozen > 0

    def clear(self) -> None:
        """Lets go of everything."""
        with self._lock:
            self._clear()

    def freeze(self) -> None:
        """From here on replicas stay as they are, until `thaw` has been called as often."""
        with self._lock:
            self._frozen += 1
            if self._frozen == 1:
                self._clear()

    def thaw(self) -> None:
        """Ends one block; after the last one nothing of it is kept."""
        with self._lock:
            self._frozen -= 1
            if self._frozen:
                return
            breaker = CycleBreaker([replica for kept in self._frozen_sets for replica in kept.replicas])
            self._clear()
        breaker.take_apart()

    @in_stage("replicate")
    def replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        """Replicas for ``slots``, as `dataparallel.replicate` makes them.

        Raises:
            RuntimeError: the tree cannot be replicated, the message names the module; or a graph is recorded inside
                `frozen`.
        """
        record = torch.is_grad_enabled()
        with self._lock:
            if self._frozen and record:
                raise RuntimeError(
                    "inside model.frozen() replicas stay as they are and no gradient leads back to the module; call "
                    "the model under torch.no_grad() or torch.inference_mode(), or outside of frozen()"
                )
            try:
                if self._is_of_a_parent:
                    self._clear()
                make = self._frozen_ones if self._frozen else self._refreshed
                with collector_paused():
                    return make(network, slots, cap_bytes, record)
            except BaseException:
                self._clear()  # it may be half-made
                raise

    def end_call(self) -> None:
        """Takes from what is kept all that the last call has left on it, activations for example."""
        with self._lock:
            self._reset()
            self._tensors.end_call()

    def forget_last_call(self) -> None:
        """Leaves what the last call has used to whoever still holds it."""
        with self._lock:
            self._shells = []
            self._tensors.forget_last_call()

    def _frozen_ones(self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool) -> list[Any]:
        for kept in self._frozen_sets:
            if kept.is_free() and kept.serves(network, slots):
                return kept.lease(len(slots))
        plan = ModulePlan.of(network)
        copies = KeptCopies().refreshed(plan, slots, cap_bytes)
        made = FrozenSet(network, slots, [build_replica(plan, tensors, record=False) for tensors in copies])
        # A set of fewer slots, made for a smaller batch, gives way to one that serves both.
        self._frozen_sets = [kept for kept in self._frozen_sets if not (kept.is_free() and kept.is_part_of(made))]
        if len(self._frozen_sets) < MOST_FROZEN:
            self._frozen_sets.append(made)
        return made.lease(len(slots))

    def _refreshed(self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool) -> list[Any]:
        self._reset()
        if self._plan is None or self._snapshot is None or not self._snapshot.still_holds(network):
            self._shells = []
            self._plan = ModulePlan.of(network)
            self._snapshot = TreeSnapshot(self._plan) if self._plan.is_plain else None
        plan = self._plan
        copies = self._tensors.for_call(plan, slots, cap_bytes, record)
        if self._snapshot is None:
            self._plan = None
        if self._snapshot is None or not ownership.can_be_told():
            return [build_replica(plan, tensors, record) for tensors in copies]
        while len(self._shells) < len(slots):
            self._shells.append(Shell(plan))
        return [shell.filled(tensors) for shell, tensors in zip(self._shells, copies, strict=False)]

    def _reset(self) -> None:
        if not all([shell.reset() for shell in self._shells]):
            self._shells = []


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Another thread may have been in the middle of something when the process was forked.

    What is kept is dropped at the next call, because that may add gradients: here torch's threads are gone, and nobody
    has told torch.
    """
    for kept in _all:
        kept._lock = threading.Lock()
        kept._is_of_a_parent = True
