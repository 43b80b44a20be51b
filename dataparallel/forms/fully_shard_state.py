"""`FullyShardState` is the state that `fully_shard` keeps for one unit. Only ``forms.fully_shard`` makes states.

A call of the outermost module uses that module's state, which holds the tree of units. Replicas are made from a twin of
that module. Their modules have the classes of the managed ones, so that units gather parameters around each call.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.call.engine import Method
from dataparallel.call.options import CallOptions
from dataparallel.comm.settings import using
from dataparallel.comm.transport_choice import why_no_tables
from dataparallel.devices import CPU
from dataparallel.forms.fully_shard_arguments import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from dataparallel.forms.managed import ManagedModule, StateOnSlots, Twin
from dataparallel.forms.unit_tensors import UnitTensors
from dataparallel.replicas.compiled.calls import CompileArgument
from dataparallel.replicas.graphs.calls import GraphedReplicas
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.replicas.plan import FORM_ATTRIBUTE, TwinInfo
from dataparallel.sharded.distribute import distribute_tensor
from dataparallel.sharded.placements import Owners, Shard
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.sharded.units.tree import Tree, Unit
from dataparallel.sharded.units.unit import Precision
from dataparallel.threads.settings import refuse_what_cannot_be_shared

if TYPE_CHECKING:
    from dataparallel.machines.arguments import MachineMesh


class FullyShardState(StateOnSlots):
    """The state of the modules of one unit.

    Attributes:
        unit: the unit, once `shard` has been called.
        graphs: the captured graphs of the replicas; ``None`` without ``graphs=True``. That of the outermost module
            counts.
    """

    may_use_source = True  # forward reads the source's shards, and copies of these are never late
    unit: Unit

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        options: CallOptions,
        *,
        placements: Sequence[Shard],
        reshard_after_forward: bool | int | None,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        ignored_parameters: Sequence[Tensor],
        machines: MachineMesh | None,
        compile: CompileArgument | None,
        graphs: bool,
    ) -> None:
        super().__init__(modules, options)
        self.machines, self.compile = machines, compile
        self.graphs = GraphedReplicas() if graphs else None
        self.peers = None if machines is None else machines.peers
        self._parameters, self._placements = list(parameters), list(placements)
        self._reshard = reshard_after_forward
        self._precision = Precision(
            mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype, mp_policy.cast_forward_inputs
        )
        self._offload = offload_policy
        self._ignored = tuple(ignored_parameters)  # else other objects could get their ids
        self._tree: Tree | None = None
        self._making = threading.Lock()  # held while the tree is made: the first calls may come at once

    def manages(self, parameter: Tensor) -> bool:
        """True for a parameter of the unit, and for one registered in its place, which the next call will adopt."""
        if self._parameters:  # these are plain: `shard` is called later, or never without slots
            return any(parameter is own for own in self._parameters)
        if not isinstance(parameter, ShardedTensor):  # fast: a form asks about each parameter of each unit
            return False
        registered = (registry.get(name) for registry, name, _ in self.unit.registries.entries)
        return any(parameter is own for own in (*self.unit.parameters, *registered))

    def shard(self) -> None:
        """Replaces the unit's parameters by sharded ones, in all modules, and moves buffers to the first slot."""
        modules = self.modules()
        is_offloaded = isinstance(self._offload, CPUOffloadPolicy)
        name = " and ".join(type(module).__name__ for module in modules)
        sharded = [
            _shard_parameter(plain, self.slots, placement, is_offloaded, self.machines)
            for plain, placement in zip(self._parameters, self._placements, strict=True)
        ]
        unit = Unit(
            name,
            sharded,
            self.slots,
            self._precision,
            is_offloaded=is_offloaded,
            pin=isinstance(self._offload, CPUOffloadPolicy) and self._offload.pin_memory,
            machines=self.machines,
        )
        unit.is_reshard_automatic = self._reshard is None
        if self._reshard is not None:
            unit.reshard_after_forward = self._reshard
        unit.number_of_modules = len(modules)
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for module in {id(m): m for top in modules for m in top.modules()}.values():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in numbers:
                    unit.registries.entries.append((module._parameters, key, numbers[id(parameter)]))
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[key] = buffer.to(self.slots[0])
        unit.registries.register(unit.parameters)
        self.unit = unit
        self._parameters = []  # frees the plain parameters

    # ---- methods of `ReplicaMaker` -----------------------------------------------------------------------------------

    def others_wait(self, is_recorded: bool) -> bool:
        """See `StateOnSlots`. They wait for the backward, or for gathers. In a backward it tells them itself."""
        has_gathers = self.machines is not None and self.machines.gathers is not None
        return (is_recorded or has_gathers) and not _torch.is_in_backward()

    def check(self, slots: Sequence[torch.device]) -> None:
        if len(slots) > 1 or _torch.is_inside_functorch_transform():
            refuse_what_cannot_be_shared()  # before nodes are made
        self._update_tree()

    def needs_no_replica(self) -> bool:
        """Returns False: with a single slot parameters are gathered too."""
        return False

    def lends(self, slots: Sequence[torch.device]) -> AbstractContextManager[Any]:
        """Begins the forward of the tree. Replicas may gather its units inside the context."""
        assert self._tree is not None
        return self._tree.calling(len(slots))

    def replicas(self, method: Method, lent: Any, slots: list[torch.device]) -> list[Any]:
        with self.kept.lock, self.joins(self.slots):  # calls of several threads share the twin
            twin = self._twin.update(self.source(), method.name)
            replicas = self.kept.replicas(twin, slots, self.options.cap_bytes)
            self._tensors.bind(replicas, lent)
            return replicas

    def joins(self, devices: Sequence[torch.device]) -> AbstractContextManager[None]:
        """Lets kernels carry outputs and their gradients where they carry parameters."""
        is_served = devices[0].type == "cuda" and why_no_tables(devices) is None
        return using(transport="cupy") if is_served else nullcontext()

    # ---- the tree of which the module is the root --------------------------------------------------------------------

    def _update_tree(self) -> None:
        """Makes the tree anew if its units have changed, and lets the units check their parameters."""
        states: dict[FullyShardState, str] = {}  # each with the path of its first module; this state is the first
        for path, module in self.source().named_modules():
            if FORM_ATTRIBUTE in vars(module):
                states.setdefault(vars(module)[FORM_ATTRIBUTE][1], path)
        units = [state.unit for state in states]
        for unit in units:
            if unit.is_reshard_automatic:
                unit.reshard_after_forward = unit is not self.unit
        with self._making:
            if self._tree is None or self._tree.units != units:
                self._tree = self._make_tree(states)
        self._tree.prepare()

    def _make_tree(self, states: Mapping[FullyShardState, str]) -> Tree:
        source, units = self.source(), [state.unit for state in states]
        for state, path in states.items():
            state.unit.name = path or state.unit.name
        ignored = [parameter for state in states for parameter in state._ignored]
        info = TwinInfo(id(source), ignored_parameters=frozenset(map(id, ignored)), allowed=ManagedModule)
        self._twin = Twin(type(source), info)
        graphs = self.graphs
        if graphs is not None and (why_none := self._why_no_graphs(units)) is not None:
            graphs.note_slots(self.slots, why_none)
            graphs = None
        self._tensors = UnitTensors(
            units,
            [state.modules() for state in states],
            [state.compile for state in states],
            keeps_buffers=graphs is not None,
        )
        self.kept = KeptReplicas(self._tensors, graphs=graphs)
        for unit in units:
            unit.graphs.discard(self.graphs)
            if graphs is not None:
                unit.graphs.add(graphs)
        return Tree(units, self.slots)

    def _why_no_graphs(self, units: Sequence[Unit]) -> str | None:
        """Why no replica is captured, in words: a unit frees its parameters after forward. ``None`` if none does."""
        for unit in units:
            if unit.reshard_after_forward is not False:
                what = f"the unit {unit.name!r} frees its parameters after forward"
                return f"{what}. Give it reshard_after_forward=False too"
        return None


def _shard_parameter(
    parameter: nn.Parameter,
    slots: Sequence[torch.device],
    placement: Shard,
    is_offloaded: bool,
    machines: MachineMesh | None,
) -> ShardedTensor:
    devices = [CPU] * len(slots) if is_offloaded else slots
    if machines is not None and machines.shard is not None:
        devices, slots = Owners(devices, machines.shard), Owners(slots, machines.shard)

    def divided(tensor: Tensor) -> ShardedTensor:
        distributed = distribute_tensor(tensor.detach(), devices, placement)
        return ShardedTensor(distributed.shards, distributed.placement, distributed.shape, devices=slots)

    sharded_parameter: Any = nn.Parameter(divided(parameter), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        sharded_parameter.grad = divided(parameter.grad)
    sharded_parameter.__dict__.update(vars(parameter))
    _torch.share_hooks(sharded_parameter, parameter)
    return sharded_parameter
