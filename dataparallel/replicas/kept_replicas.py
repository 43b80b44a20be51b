"""`KeptReplicas` makes the replicas of each call, and keeps those that stay.

Each call sees the source as it is then, and nothing that ``forward`` did to earlier replicas.
"""

from __future__ import annotations

import copy
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.comm.streams.arrivals import arrivals_for
from dataparallel.comm.streams.current import current_streams
from dataparallel.comm.streams.held import let_go_of_passed
from dataparallel.forks import in_forked_child
from dataparallel.replicas.build import collector_paused
from dataparallel.replicas.compiled.calls import CompileArgument
from dataparallel.replicas.graphs.calls import GraphedReplicas
from dataparallel.replicas.plan import ModulePlan, check_tensors, refuse_constants
from dataparallel.replicas.replicate import Copies
from dataparallel.replicas.stamp import PlanStamp, Stamp
from dataparallel.weak_members import WeakMembers


class TensorStore(ABC):
    """Tensors that stay on the slots, for the replicas of one call at a time. A copy of a store is an empty one.

    Attributes:
        are_copies: true if they are copies of the source's tensors, which then have to be on the first slot.
        replicas: the replicas that have them. `clear` drops these too.
    """

    are_copies = True
    replicas: KeptModules | None = None

    @abstractmethod
    def for_call(self, copies: Copies) -> list[list[Tensor]]:
        """Returns for each slot the tensors of the plan of ``copies``, with the source's current values.

        These are ``copies``, which the store makes, or others that it has. It launches what may arrive late.
        """

    def start_afresh_after_fork(self) -> None:  # noqa: B027 - some stores have no lock
        """Called in a forked child, where a thread of the parent may have held a lock."""

    @abstractmethod
    def clear(self) -> None:
        """Drops everything."""


class _LeasedInTurn:
    """Replicas that serve one call at a time."""

    def __init__(self, replicas: list[Any]) -> None:
        self._replicas, self.is_free = replicas, True

    def lease_first(self, count: int) -> Lease:
        self.is_free = False
        return Lease(self._replicas[:count], self)

    def end_lease(self) -> None:
        self.is_free = True


class Lease(list[Any]):
    """The replicas of one call. Other calls get them only after this list is deleted.

    A failed call's traceback keeps the list. Code that refers to a replica for longer does not: it may see other calls.
    """

    def __init__(self, replicas: Sequence[Any], owner: _LeasedInTurn) -> None:
        super().__init__(replicas)
        self._owner = owner

    def __del__(self) -> None:
        self._owner.end_lease()


class KeptModules(_LeasedInTurn):
    """Module objects of replicas that serve one call after the other, while their tensors stay.

    They differ from the source in their tensors and children only (``ModulePlan.is_plain``). Graphs are not waited for:
    like the source itself, a replica may run for another call before the backward of the last one. Replicas that
    ``forward`` has changed serve no other call. They are dropped at the end of the call if it has failed, or if they
    have new attributes, which may hold much memory. Otherwise they are dropped before the next call.
    """

    def __init__(self, copies: Copies, graphs: GraphedReplicas | None) -> None:
        super().__init__(copies.build_replicas())
        self._plan, self._graphs, self._expected = copies.plan, graphs, copies.expected
        if graphs is not None:
            graphs.attach_all(self._replicas, copies)
        entries = copies.plan.entries
        trees = [[replica.get_submodule(entry.name) for entry in entries] for replica in self._replicas]
        self._stamps = [Stamp(modules, ["_modules"]) for modules in trees]
        positions = [each for entry in entries for each in (entry.parameters, entry.buffers)]
        tables = [[vars(each)[name] for each in tree for name in ("_parameters", "_buffers")] for tree in trees]
        self._registries = [[*zip(of_tree, positions, strict=True)] for of_tree in tables]

    def serves(self, copies: Copies) -> bool:
        count = len(copies.slots)
        return (
            copies.plan is self._plan
            and self.is_free
            and count <= len(self._replicas)
            and (copies.arrivals is None) == (self._expected[0] is None)
            and all(stamp.holds() for stamp in self._stamps[:count])
        )

    def lease(self, copies: Copies) -> Lease:
        if self._graphs is not None:
            self._graphs.serve(copies.by_slot)
        copies.expect(self._expected)
        for slot, tensors in enumerate(copies.by_slot):
            table = self._plan.table(tensors)
            for registry, positions in self._registries[slot]:
                if registry.keys() != positions.keys():
                    registry.clear()
                for name, position in positions.items():
                    registry[name] = table[position]
        return self.lease_first(len(copies.slots))

    def end_lease(self) -> None:
        """Lets another call lease the replicas, or drops them if they have new attributes."""
        if all(stamp.sizes_hold() for stamp in self._stamps):
            super().end_lease()
        else:
            self._replicas, self._stamps, self._registries = [], [], []


MOST_FROZEN = 4
"""One ``frozen`` block keeps at most so many sets of replicas. If more calls run at a time, others are not kept."""

_all: WeakMembers[KeptReplicas] = WeakMembers()


class KeptReplicas:
    """Makes the replicas of one wrapper or module.

    Each call sends all values, because a write through ``.data`` leaves no trace, and has module objects of its own:
    what ``forward``, a hook or a graph keeps of a replica stays as it is. Only if the form's tensors stay on the slots,
    modules of plain trees stay too, and serve one call at a time. Inside ``frozen`` replicas stay, and nothing
    is sent. The plan of the tree is kept too, while the tree stays the same. An object that is replaced in the source
    is held here until the next call.

    Any thread may use it. Copying or unpickling gives an empty `KeptReplicas`.

    ``tensors``: those that stay; without them each call has new ones. ``lock`` is held while replicas are made. A form
    whose replicas are made from a twin takes it before it updates the twin: calls of several threads share that.
    """

    def __init__(
        self,
        tensors: TensorStore | None = None,
        compile: CompileArgument | None = None,
        graphs: GraphedReplicas | None = None,
    ) -> None:
        self._tensors, self._compile, self.graphs = tensors, compile, graphs
        self.lock = threading.RLock()
        self._frozen_blocks = 0  # how many are open
        self._clear()
        _all.add(self)
        weakref.finalize(self, let_go_of_passed).atexit = False  # no call may come that would ask again

    def __reduce__(self) -> tuple[type[KeptReplicas], tuple[Any, ...]]:
        return KeptReplicas, (copy.copy(self._tensors), self._compile, copy.copy(self.graphs))

    def _make_plan(self, network: nn.Module) -> ModulePlan:
        root_call = None if self._compile is None else self._compile.of(network)
        return ModulePlan.of(network, root_call)

    def _clear(self) -> None:
        self._stamp: PlanStamp | None = None  # ``None`` if the tree is not plain
        self._frozen_sets: list[_FrozenSet] = []
        self._is_from_before_fork = False  # the parent process has made everything that is kept
        if self._tensors is not None:
            self._tensors.clear()

    def drop_modules(self) -> None:
        """Drops the modules of replicas that stay: a failed call may have left activations on them."""
        if self._tensors is not None:
            with self.lock:
                self._tensors.replicas = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A block in which replicas stay as they are. Blocks may be nested."""
        with self.lock:
            self._frozen_blocks += 1
            if self._frozen_blocks == 1:
                self._clear()
        try:
            yield
        finally:
            with self.lock:
                self._frozen_blocks -= 1
                if not self._frozen_blocks:
                    self._clear()

    def replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        record = torch.is_grad_enabled()
        with self.lock:
            if self._frozen_blocks and record:
                raise RuntimeError(
                    "inside frozen() replicas stay as they are and no gradient leads back to the module; call "
                    "the model under torch.no_grad() or torch.inference_mode(), or outside of frozen()"
                )
            try:
                if self._is_from_before_fork:
                    self._clear()
                with collector_paused():
                    if self._frozen_blocks:
                        return self._frozen_replicas(network, slots, cap_bytes)
                    return self._new_replicas(network, slots, cap_bytes, record)
            except BaseException:
                self._clear()  # kept objects may be half-made
                raise

    def _frozen_replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int) -> list[Any]:
        for kept in self._frozen_sets:
            if kept.serves(network, slots):
                return kept.lease_first(len(slots))
        plan = self._make_plan(network)
        check_tensors(plan.tensors, slots[0], network)
        refuse_constants(plan, slots)
        copies = Copies(plan, slots, cap_bytes, False)
        copies.send_leaves()
        replicas = copies.build_replicas()
        graphs = None if self.graphs is None else self.graphs.another()
        if graphs is not None:
            graphs.attach_all(replicas, copies)
        new_set = _FrozenSet(network, copies, replicas, graphs)
        # A set for fewer slots was made for a smaller batch, whose calls the new set serves too.
        sets = self._frozen_sets
        self._frozen_sets = [kept for kept in sets if not kept.is_free or len(kept.slots) >= len(slots)]
        if len(self._frozen_sets) < MOST_FROZEN:
            self._frozen_sets.append(new_set)
        return new_set.lease_first(len(slots))

    def _new_replicas(self, network: nn.Module, slots: list[torch.device], cap_bytes: int, record: bool) -> list[Any]:
        if self._stamp is not None and self._stamp.holds(network):
            plan = self._stamp.plan
        else:
            self._stamp = None
            plan = self._make_plan(network)
            self._stamp = PlanStamp(plan) if plan.is_plain else None
        if self._tensors is None or self._tensors.are_copies:
            check_tensors(plan.tensors, slots[0], network)
        refuse_constants(plan, slots)
        copies = Copies(plan, slots, cap_bytes, record, arrivals_for(slots, plan.tensors))
        if self._tensors is not None:
            copies.by_slot = self._tensors.for_call(copies)
        elif record:
            copies.send()
        else:
            copies.send_leaves()
        if record and plan.cycles is not None and not plan.cycles.are_held_by_graph:
            plan.cycles = None  # nothing tells how long the graph needs the replicas
        graphs = self.graphs
        # A thread of a backward waits for its call meanwhile, and a capture's own backward would need that thread.
        has_no_graphs = graphs is not None and _torch.is_in_backward()
        if self._tensors is None or self._stamp is None or has_no_graphs:
            if graphs is not None:
                graphs.prepare(plan, slots)
            return copies.build_replicas()
        kept = self._tensors.replicas
        if kept is None or not kept.serves(copies):
            kept = self._tensors.replicas = KeptModules(copies, graphs)
        return kept.lease(copies)


class _FrozenSet(_LeasedInTurn):
    """A set of replicas inside ``frozen``."""

    def __init__(self, network: nn.Module, copies: Copies, replicas: list[Any], graphs: GraphedReplicas | None) -> None:
        super().__init__(replicas)
        self.slots, self._graphs, cycles = copies.slots, graphs, copies.plan.cycles
        self._hold = None if cycles is None else cycles.hold("call")
        # Only these streams are ordered after the copies that made the set, and before its memory is used again.
        self._network, self._streams = network, current_streams(self.slots)
        self._hooks = _hook_tables(network)

    def serves(self, network: nn.Module, slots: list[torch.device]) -> bool:
        """True if a call of ``network`` on ``slots`` and on the current streams may use the set."""
        return (
            self.is_free
            and network is self._network
            and all(map(is_, _hook_tables(network), self._hooks))
            and self.slots[: len(slots)] == slots
            and current_streams(slots).items() <= self._streams.items()
        )


def _hook_tables(network: nn.Module) -> list[Any]:
    """Returns the hook tables of the root. Of a twin, ``forward`` uses other tables than other methods do."""
    return [vars(network).get(name) for name in _torch.HOOK_TABLES]


@in_forked_child
def _start_afresh_after_fork() -> None:
    """Replaces locks, which another thread may have held at the fork. The next call drops the parent's replicas.

    Replicas are not dropped here: this may add gradients, and torch does not know yet that its threads are gone.
    """
    for kept in _all:
        kept.lock = threading.RLock()
        if kept._tensors is not None:
            kept._tensors.start_afresh_after_fork()
        kept._is_from_before_fork = True
