"""`KeptModules` lets the module objects of replicas serve one call after the other, if their tensors stay.

They differ from the source in their tensors and children only (``ModulePlan.is_plain``). What a ``forward`` has
assigned to attributes is not there in the next call: such replicas are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Protocol

from torch import Tensor, nn

from dataparallel.comm.streams.arrivals import Arrivals, ExpectedArrivals
from dataparallel.replicas.build import build_replica
from dataparallel.replicas.graphs.calls import GraphedReplicas
from dataparallel.replicas.plan import ModulePlan
from dataparallel.replicas.tree_state import Contents, TreeState


class KeptModules:
    """Replicas for as many slots as there are lists of tensors in ``copies``.

    They serve one call at a time. Graphs are not waited for: like the source itself, a replica may run for another call
    before the backward of the last one. Replicas that ``forward`` has changed serve no other call. They are dropped at
    the end of the call if it has failed, or if they have new attributes, which may hold much memory. Otherwise they are
    dropped before the next call.
    """

    def __init__(
        self,
        plan: ModulePlan,
        copies: Sequence[list[Tensor]],
        arrivals: Arrivals | None,
        graphs: GraphedReplicas | None = None,
    ) -> None:
        self._plan = plan
        self._expected = [None if arrivals is None else ExpectedArrivals() for _ in copies]
        self._replicas = [
            build_replica(plan, tensors, True, expected)
            for tensors, expected in zip(copies, self._expected, strict=True)
        ]
        self._graphs = graphs
        if graphs is not None:
            graphs.attach_all(self._replicas, copies)
        self._tables = [_Tables(plan, replica) for replica in self._replicas]
        self._is_leased = False

    def serves(self, plan: ModulePlan, count: int, arrivals: Arrivals | None) -> bool:
        """True if a call on ``count`` slots may lease replicas."""
        return (
            plan is self._plan
            and not self._is_leased
            and count <= len(self._replicas)
            and (arrivals is None) == (self._expected[0] is None)
            and all(tables.are_unchanged() for tables in self._tables[:count])
        )

    def lease(self, copies: Sequence[list[Tensor]], arrivals: Arrivals | None) -> Lease:
        if self._graphs is not None:
            self._graphs.serve(copies)
        for slot, (tensors, tables, expected) in enumerate(zip(copies, self._tables, self._expected, strict=False)):
            if arrivals is not None and expected is not None:
                arrivals.expect(expected, slot, len(tensors) + len(self._plan.shared) + 1)
            tables.fill(self._plan.table(tensors))
        self._is_leased = True
        return Lease(self._replicas[: len(copies)], self)

    def end_lease(self) -> None:
        """Lets another call lease the replicas, or drops them if they have new attributes."""
        if all(tables.are_of_same_size() for tables in self._tables):
            self._is_leased = False
        else:
            self._replicas, self._tables = [], []


class _Owner(Protocol):
    def end_lease(self) -> None: ...


class Lease(list[Any]):
    """The replicas of one call. Other calls get them only after this list is deleted.

    A failed call's traceback keeps the list. Code that refers to a replica for longer does not: it may see other calls.
    """

    def __init__(self, replicas: Sequence[Any], owner: _Owner) -> None:
        super().__init__(replicas)
        self._owner = owner

    def __del__(self) -> None:
        self._owner.end_lease()


class _Tables:
    """The modules of one replica, as they were when it was built, and the tensors in their registries."""

    def __init__(self, plan: ModulePlan, replica: nn.Module) -> None:
        modules = [replica.get_submodule(entry.name) for entry in plan.entries]
        self._state = TreeState(modules, ["_modules"])
        self._registries = [vars(module)[name] for module in modules for name in ("_parameters", "_buffers")]
        self._positions = [
            [*positions.items()] for entry in plan.entries for positions in (entry.parameters, entry.buffers)
        ]
        self._tensors: list[Any] = []
        self._filled = Contents([])

    def fill(self, tensors: list[Any]) -> None:
        """Puts ``tensors``, by position in the plan, into the registries."""
        is_same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if is_same and self._filled.are_in(self._registries):
            return
        for registry, positions in zip(self._registries, self._positions, strict=True):
            if len(registry) != len(positions):
                registry.clear()
            for name, position in positions:
                registry[name] = tensors[position]
        self._tensors, self._filled = tensors, Contents(self._registries)

    def are_of_same_size(self) -> bool:
        """True if each module has as many attributes as it had."""
        return self._state.is_of_same_size()

    def are_unchanged(self) -> bool:
        """True if classes, attributes, children and hooks are what they were. Tensors may be others."""
        return self._state.is_unchanged()
