"""The state that `fully_shard` keeps for one unit, and how a call of the outermost module runs on the slots.

A call arrives in `FullyShardState.run` and goes through the four stages. The replicas are made from a twin of the
module, as those of `replicate` are. Their modules have the same classes, which let the units of the tree (``units``)
gather parameters around each call. Only ``composable.fully_shard_form`` makes states.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.batch_split import BatchSplit
from dataparallel.chunk_sizes import ChunkSizes
from dataparallel.compiled.calls import CompileArgument
from dataparallel.composable.managed import KEY, ManagedModule, Twin
from dataparallel.composable.on_slots import Method
from dataparallel.composable.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from dataparallel.composable.unit_tensors import UnitTensors
from dataparallel.devices import DeviceLike, resolve, resolve_output
from dataparallel.kept.replicas import KeptReplicas
from dataparallel.modules.plan import TwinInfo
from dataparallel.parallel_apply import run_replicas
from dataparallel.profiling import stage
from dataparallel.replicate import BUCKET_CAP_MB, cap_in_bytes
from dataparallel.scatter_gather import gather, scatter_arguments
from dataparallel.sharded.distribute import distribute_tensor
from dataparallel.sharded.placements import Shard
from dataparallel.sharded.tensor import ShardedTensor
from dataparallel.stages import Call
from dataparallel.structures import arguments_of_one
from dataparallel.threads.permits import PermitChooser
from dataparallel.units.over_machines import MachinesOfTree
from dataparallel.units.tree import Tree
from dataparallel.units.unit import Precision, Unit

if TYPE_CHECKING:
    from dataparallel.machines.peer_rounds import PeerCall

__all__ = ["FullyShardState"]


class FullyShardState:
    """The state of the modules of one unit. It refers to them weakly.

    Args:
        modules: of the unit; calls of other modules below them that have no unit of their own need this one's.
        parameters: of the unit, which `shard` replaces.
        slots: the devices; none if there is no accelerator.
        placements: for each parameter how it is cut.
        reshard_after_forward, is_reshard_automatic: as for `Unit`; automatic means that the user gave ``None``.
        ignored_parameters: those that all replicas share.
        machines: over which the unit is spread, if there are several.
        compile: how replicas of the modules are compiled, if these are not compiled themselves.

    Attributes:
        unit: the unit, once `shard` has been called.
        methods: names of methods that run on replicas.
    """

    unit: Unit

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        slots: Sequence[torch.device],
        *,
        placements: Sequence[Shard],
        reshard_after_forward: bool | int,
        is_reshard_automatic: bool,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        ignored_parameters: Sequence[Tensor],
        output_device: DeviceLike | None,
        dim: int,
        chunk_sizes: ChunkSizes,
        machines: MachinesOfTree | None = None,
        compile: CompileArgument | None = None,
    ) -> None:
        self.machines, self.compile = machines, compile
        self.slots, self.output_device, self.dim = list(slots), output_device, dim
        self.methods = {"forward"}
        self._modules = [weakref.ref(module) for module in modules]
        self._parameters, self._placements = list(parameters), list(placements)
        self._reshard, self._is_automatic = reshard_after_forward, is_reshard_automatic
        self._precision = Precision(
            mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype, mp_policy.cast_forward_inputs
        )
        self._offload = offload_policy
        self._ignored = tuple(ignored_parameters)  # else other objects could get their ids
        self._permits = PermitChooser()
        self._split = BatchSplit(chunk_sizes, len(slots))
        self._tree: Tree | None = None

    def manages(self, parameter: Tensor) -> bool:
        """True if it is a parameter of the unit, or registered in the place of one: the next call will adopt it."""
        if self._parameters:  # plain ones: `shard` comes later, or never without slots
            return any(parameter is own for own in self._parameters)
        if not isinstance(parameter, ShardedTensor):  # most are not, and forms ask about each parameter of each unit
            return False
        registered = (registry.get(name) for registry, name, _ in self.unit.places)
        return any(parameter is own for own in (*self.unit.parameters, *registered))

    # ---- the parameters become sharded -------------------------------------------------------------------------------

    def shard(self) -> None:
        """Replaces the unit's parameters by sharded ones, in all modules, and moves buffers to the first slot."""
        modules = [self._module(i) for i in range(len(self._modules))]
        is_offloaded = isinstance(self._offload, CPUOffloadPolicy)
        sharded = [
            _sharded(parameter, self.slots, placement, is_offloaded, self.machines)
            for parameter, placement in zip(self._parameters, self._placements, strict=True)
        ]
        name = " and ".join(type(module).__name__ for module in modules)
        unit = Unit(
            name,
            sharded,
            self.slots,
            self._precision,
            is_offloaded=is_offloaded,
            pin=isinstance(self._offload, CPUOffloadPolicy) and self._offload.pin_memory,
            machines=self.machines,
        )
        unit.reshard_after_forward, unit.is_reshard_automatic = self._reshard, self._is_automatic
        unit.number_of_modules = len(modules)
        position = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        for module in {id(m): m for top in modules for m in top.modules()}.values():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in position:
                    unit.places.append((module._parameters, key, position[id(parameter)]))
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[key] = buffer.to(self.slots[0])
        unit.register_sharded()
        self.unit = unit
        self._parameters = []  # frees the plain ones

    # ---- a call ------------------------------------------------------------------------------------------------------

    @property
    def chunk_sizes(self) -> ChunkSizes:
        """How the slots share a batch: may be assigned between calls, as that of `dataparallel.DataParallel`."""
        return self._split.given

    @chunk_sizes.setter
    def chunk_sizes(self, given: ChunkSizes) -> None:
        self._split = BatchSplit(given, len(self.slots))

    def run(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``method`` for the whole batch, on the output device.

        Raises:
            RuntimeError: parameters have no memory or a buffer is not on the first slot; a replica cannot be made or
                run here.
            ValueError: inputs cannot be split or outputs cannot be joined; the message names the place.
            Exception: a replica raised it.
        """
        if not self.slots:
            inputs, kwargs = arguments_of_one(inputs, kwargs)
            return method.of_module(*inputs, **kwargs)
        return self._run_outside_the_compiler(method, inputs, kwargs)

    @_torch.not_traced
    def _run_outside_the_compiler(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.machines is None:
            return self._run(method, inputs, kwargs)
        mode = method.name, torch.is_grad_enabled(), self._source.training
        try:
            with self.machines.peers.calling(mode) as peers:
                return self._run(method, inputs, kwargs, peers)
        except BaseException as error:
            if not _torch.is_in_backward():  # else the pass has failed, and tells the other machines
                self.machines.forward_failed(error, was_recorded=torch.is_grad_enabled())
            raise

    def _run(
        self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any], peers: PeerCall | None = None
    ) -> Any:
        """The checks before the four stages, and the context around them. ``peers``: what spans machines in forward."""
        slots = [resolve(device) for device in self.slots]
        output_device = resolve_output(self.output_device, slots)
        tree = self._updated_tree()
        balanced = self._split.of_call(self._source, slots, inputs, kwargs, method.name)
        with Call(slots, self._kept, may_use_source=True) as call, balanced:
            return self._stages(call, tree, slots, output_device, method, inputs, kwargs, peers)

    def _stages(
        self,
        call: Call,
        tree: Tree,
        slots: list[torch.device],
        output_device: torch.device,
        method: Method,
        inputs: Any,
        kwargs: Any,
        peers: PeerCall | None,
    ) -> Any:
        """The four stages. ``inputs`` and ``kwargs`` are those of the batch, then a tuple with one entry per slot."""
        with stage("scatter"), call.scatters():
            inputs, kwargs = scatter_arguments(inputs, kwargs, slots, self.dim, self._split, call.reads)
        if not inputs and not kwargs:  # a call without arguments
            inputs, kwargs = ((),), ({},)
        slots = slots[: len(inputs)]
        with tree.calling(len(slots)) as forward:
            with stage("replicate", "fully_shard"):
                twin = self._twin.update(self._source, method.name)
                replicas = call.uses(self._kept.replicas(twin, slots, _CAP_BYTES))
                self._tensors.bind(replicas, forward)
            with stage("parallel_apply"):
                outputs = run_replicas(
                    replicas,
                    inputs,
                    kwargs,
                    slots,
                    chooser=self._permits,
                    method=method.name,
                    balanced=self._split.call,
                    machines=peers,
                )
        with stage("gather"):
            output = gather(outputs, output_device, self.dim)
        if peers is not None:
            peers.watch(output)
        return output

    # ---- the tree of which the module is the root --------------------------------------------------------------------

    def _module(self, number: int) -> nn.Module:
        module = self._modules[number]()
        if module is None:
            raise RuntimeError("the module of this state is gone")
        return module

    @property
    def _source(self) -> nn.Module:
        return self._module(0)

    def _states_below(self) -> Iterator[tuple[str, FullyShardState]]:
        """The states of the tree with the paths of their modules, this one first."""
        seen: set[int] = set()
        for path, module in self._source.named_modules():
            form_and_state = vars(module).get(KEY)
            if form_and_state is not None and id(form_and_state[1]) not in seen:
                seen.add(id(form_and_state[1]))
                yield path, form_and_state[1]

    def _updated_tree(self) -> Tree:
        """The tree, with units that have seen what has happened to their parameters since the last call."""
        states = [*self._states_below()]
        units = [state.unit for _, state in states]
        if self._tree is None or self._tree.units != units:
            self._tree = self._made_tree(states)
        for unit in units:
            if unit.is_reshard_automatic:
                unit.reshard_after_forward = unit is not self.unit
        self._tree.prepare()
        return self._tree

    def _made_tree(self, states: Sequence[tuple[str, FullyShardState]]) -> Tree:
        source, units = self._source, [state.unit for _, state in states]
        for path, state in states:
            state.unit.name = path or state.unit.name
        ignored = [parameter for _, state in states for parameter in state._ignored]
        info = TwinInfo(id(source), ignored_parameters=frozenset(map(id, ignored)), allowed=ManagedModule)
        self._twin = Twin(type(source), info)
        tops = [[*map(state._module, range(len(state._modules)))] for _, state in states]
        self._tensors = UnitTensors(units, tops, [state.compile for _, state in states])
        self._kept = KeptReplicas(self._tensors)
        return Tree(units, self.slots)


_CAP_BYTES = cap_in_bytes(BUCKET_CAP_MB)


def _sharded(
    parameter: nn.Parameter,
    slots: Sequence[torch.device],
    placement: Shard,
    is_offloaded: bool,
    machines: MachinesOfTree | None,
) -> ShardedTensor:
    """The parameter, sharded over the slots; its shards are in host memory if it is offloaded."""
    places = [torch.device("cpu")] * len(slots) if is_offloaded else slots
    if machines is not None:
        places, slots = machines.owners(places), machines.owners(slots)
    made = distribute_tensor(parameter.detach(), places, placement)
    sharded = ShardedTensor(made.shards, made.placement, made.shape, devices=slots)
    found: Any = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    found.__dict__.update(vars(parameter))
    _torch.share_hooks(found, parameter)
    return found
