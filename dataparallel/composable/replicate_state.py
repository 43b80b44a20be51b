"""The state that `replicate` keeps for one module: its slots, its replicas, and how a call of it runs on them.

A call of the module arrives in `ReplicateState.run` and goes through the four stages. Replicas are made from a twin: an
object of the original class with all attributes of the module. Only ``composable.replicate`` makes states.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.batch_split import BatchSplit
from dataparallel.chunk_sizes import ChunkSizes
from dataparallel.compiled.calls import CompileArgument, call_of, compiled_here
from dataparallel.composable.comm_hooks import CommHook, GradBucket
from dataparallel.composable.hooked_sums import HookedSums
from dataparallel.composable.managed import KEY, Twin
from dataparallel.composable.on_slots import Method
from dataparallel.composable.persistent_tensors import PersistentTensors
from dataparallel.devices import DeviceLike, resolve, resolve_output
from dataparallel.kept.replicas import KeptReplicas
from dataparallel.losses import CallLoss, ReplicaLoss
from dataparallel.modules.placement import check_placement
from dataparallel.modules.plan import TwinInfo
from dataparallel.parallel_apply import run_replicas
from dataparallel.profiling import stage
from dataparallel.scatter_gather import gather, scatter_arguments
from dataparallel.stages import Call, run_alone
from dataparallel.structures import arguments_of_one
from dataparallel.threads.meetings import Meeting
from dataparallel.threads.permits import PermitChooser

if TYPE_CHECKING:
    from dataparallel.composable.machine_sums import Agreement
    from dataparallel.machines.group import Machines
    from dataparallel.machines.peer_rounds import PeerCall, PeerRounds

__all__ = ["ReplicateState"]


class ReplicateState:
    """The state of one module. It refers to the module weakly, and to ignored modules and parameters strongly.

    Args:
        module: a module that is not replicated yet; replicas get its class.
        slots: the slots; none if there is no accelerator.
        cap_bytes, first_bytes: sizes of the buckets, and of the bucket whose gradients come first.
        machines: over which gradients are summed too; ``None``: this one alone.
        average: if true, the sums of all machines are divided by their number.
        compile: how replicas are compiled, if the module is not compiled itself.

    Attributes:
        methods: names of methods that run on replicas.
        tensors: the tensors of the replicas.
        machines: the same ranks, with a group of the module's own.
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[torch.device],
        *,
        output_device: DeviceLike | None,
        dim: int,
        chunk_sizes: ChunkSizes,
        cap_bytes: int,
        first_bytes: int,
        broadcast_buffers: bool,
        ignored_modules: Sequence[nn.Module] = (),
        ignored_parameters: Sequence[Tensor] = (),
        machines: Machines | None = None,
        average: bool = True,
        compile: CompileArgument | None = None,
        loss: ReplicaLoss | None = None,
    ) -> None:
        self.slots, self.output_device, self.dim = list(slots), output_device, dim
        self.cap_bytes = cap_bytes
        self.methods = {"forward"}
        self._module = weakref.ref(module)
        self._ignored = (*ignored_modules, *ignored_parameters)  # else other objects could get their ids
        self._twin_info = TwinInfo(
            id(module), frozenset(ignored_modules), frozenset(id(parameter) for parameter in ignored_parameters)
        )
        self._twin = Twin(type(module), self._twin_info)
        self._permits = PermitChooser()
        self._split = BatchSplit(chunk_sizes, len(slots))
        self.machines = machines
        self._settings: dict[str, Any] = {
            "first_bytes": first_bytes,
            "cap_bytes": cap_bytes,
            "broadcast_buffers": broadcast_buffers,
        }
        self._agreement: Agreement | None = None
        self._peers: PeerRounds | None = None
        self._hook: CommHook | None = None
        self.tensors = PersistentTensors(self.slots, first_bytes, cap_bytes, broadcast_buffers)
        if machines is not None:
            self._settings["average"] = average
        self._compile = compile
        self._loss = loss
        self._kept = KeptReplicas(self.tensors, compile)

    def manages(self, parameter: Tensor) -> bool:
        """True if replicas have copies of it."""
        return id(parameter) not in self._twin_info.ignored_parameters

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
            RuntimeError: a parameter or buffer is not on the first slot; a replica cannot be made or run here.
            ValueError: inputs cannot be split or outputs cannot be joined; the message names the place.
            Exception: a replica raised it.
        """
        loss = None
        if self._loss is not None:
            kwargs, loss = self._loss.asked(kwargs)
        if not self.slots:
            inputs, kwargs = arguments_of_one(inputs, kwargs)
            return self._alone(method, loss)(*inputs, **kwargs)
        return self._run_outside_the_compiler(method, inputs, kwargs, loss)

    @_torch.not_traced
    def _run_outside_the_compiler(
        self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: CallLoss | None
    ) -> Any:
        if self._agreement is None or self._peers is None:
            return self._run(method, inputs, kwargs, loss)
        failing = self._failing_together(self._agreement) if torch.is_grad_enabled() else nullcontext()
        with failing, self._peers.calling((method.name, torch.is_grad_enabled(), self._source.training)) as peers:
            return self._run(method, inputs, kwargs, loss, peers)

    def _run(
        self,
        method: Method,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: CallLoss | None,
        peers: PeerCall | None = None,
    ) -> Any:
        """The checks before the four stages, and the context around them. ``peers``: what spans machines in forward."""
        slots = [resolve(device) for device in self.slots]
        output_device = resolve_output(self.output_device, slots)
        check_placement(self._source, slots[0], self._twin_info.ignored_modules, self._twin_info.ignored_parameters)
        overridden = getattr(self.replicate, "__func__", None) is not ReplicateState.replicate
        balanced = self._split.of_call(self._source, slots, inputs, kwargs, method.name)
        with Call(slots, self._kept, may_use_source=overridden) as call, balanced:
            return self._stages(call, slots, output_device, method, inputs, kwargs, loss, peers)

    def _stages(
        self,
        call: Call,
        slots: list[torch.device],
        output_device: torch.device,
        method: Method,
        inputs: Any,
        kwargs: Any,
        loss: CallLoss | None,
        peers: PeerCall | None,
    ) -> Any:
        """The four stages. ``inputs`` and ``kwargs`` are those of the batch, then a tuple with one entry per slot."""
        with stage("scatter"):
            inputs, kwargs = scatter_arguments(inputs, kwargs, slots, self.dim, self._split, call.reads)
        if not inputs and not kwargs:  # a call without arguments
            inputs, kwargs = ((),), ({},)
        passes = self.tensors.passes if torch.is_grad_enabled() else None
        if len(slots) == 1 and passes is None:
            alone = partial(run_alone, self._alone(method, loss), inputs[0], kwargs[0], slots[0], output_device)
            return alone() if peers is None else Meeting(slots, peers).run(0, alone)
        slots = slots[: len(inputs)]
        with stage("replicate", "replicate"), call.replicates():
            replicas = call.uses(self.replicate(self._updated_twin(method.name), slots))
            then = None if loss is None else loss.on_slots(slots, kwargs, self.dim, self.cap_bytes)
        with stage("parallel_apply"):
            outputs = run_replicas(
                replicas,
                inputs,
                kwargs,
                slots,
                chooser=self._permits,
                method=method.name,
                balanced=self._split.call,
                then=then,
                machines=peers,
            )
        with stage("gather"):
            gathered = partial(gather, target_device=output_device, dim=self.dim)
            output = gathered(outputs) if loss is None else loss.of_batch(outputs, gathered)
        if passes is not None:
            passes.notice(output)
        if peers is not None:
            peers.watch(output)
        return output

    def _alone(self, method: Method, loss: CallLoss | None) -> Callable[..., Any]:
        """What runs ``method`` without replicas, and computes the loss if there is one."""
        run = self._output_alone(method)
        return run if loss is None else loss.alone(run)

    def _output_alone(self, method: Method) -> Callable[..., Any]:
        """What runs ``method`` without replicas: compiled if replicas would be, by way of the twin."""
        # What is being compiled contains the module.
        if torch.compiler.is_dynamo_compiling() or method.name != "forward" or not _torch.is_compiler_loaded():
            return method.of_module
        twin = self._updated_twin(method.name)
        root = compiled_here(twin) if self._compile is None else self._compile.of(twin)
        return method.of_module if root is None or root.child is not None else call_of(twin, root)

    def replicate(self, source: nn.Module, slots: list[torch.device]) -> list[Any]:
        """The stage that makes replicas; override it on this object to make them in another way."""
        return self._kept.replicas(source, slots, self.cap_bytes)

    def check_for_machines(self, converts: bool) -> None:
        """Checks that the module can be replicated over machines. ``converts``: its BatchNorms will be converted.

        Raises:
            TypeError: its parameters are DTensors, sparse or nested.
            ValueError: it has torch's SyncBatchNorm, and several slots.
        """
        from dataparallel.machines.arguments import refuse_tensor_parallel

        source = self._source
        refuse_tensor_parallel(source)
        synchronised = any(isinstance(child, nn.SyncBatchNorm) for child in source.modules())
        if len(self.slots) > 1 and synchronised and not converts:
            raise ValueError(
                f"the {type(source).__name__} has a torch.nn.SyncBatchNorm and {len(self.slots)} slots: the slots of "
                "one process would call collectives of one group at the same time. Pass "
                'sync_batch_norm="across_machines", or use one slot for each process'
            )

    def begin(self) -> None:
        """Compares the module with that of the other machines, and gives it the values of rank 0.

        Raises:
            MachinesDiffer: on every rank; the message names what differs.
        """
        if self.machines is None:
            return
        from dataparallel.composable.machine_sums import Agreement, MachineSums
        from dataparallel.machines.peer_rounds import PeerRounds
        from dataparallel.machines.start import compare, describe, send_values

        source = self._source
        ignored = {id(tensor) for module in self._twin_info.ignored_modules for tensor in module.buffers()}
        parameters = {name: each for name, each in source.named_parameters() if self.manages(each)}
        buffers = {name: each for name, each in source.named_buffers() if id(each) not in ignored}
        what = f"`replicate` of a {type(self._twin.module).__name__}"
        compare(self.machines, what, describe(parameters, buffers, self.slots, self._settings))
        # Rounds come one after the other, and those of modules and of their replicas' collectives do not wait for each
        # other.
        self.machines = self.machines.another()
        self._peers = PeerRounds(self.machines.another())
        self.machines.make_communicators(self.slots[:1])
        send_values(self.machines, {**parameters, **buffers})
        self._agreement = Agreement(self.machines)
        self.tensors.agree_by(self._agreement, MachineSums(self.machines, bool(self._settings["average"])))

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """See `ReplicatedModule.register_comm_hook`."""
        registered = CommHook(state, hook)
        if self._hook is not None:
            raise RuntimeError(
                f"the module has the communication hook {self._hook.name} already. It can have one, and keeps it; a "
                "hook of your own can call others"
            )
        if not self.slots:
            raise RuntimeError(
                "there is no accelerator, so the module just runs, and no gradients are summed: call replicate with "
                "devices=['cpu'] if a hook is to get them"
            )
        if self.machines is None:
            self.tensors.take_further(HookedSums(registered))
        else:
            from dataparallel.composable.hooked_machine_sums import HookedMachineSums

            self.tensors.take_further(HookedMachineSums(registered, self.machines))
        self._hook = registered

    @contextmanager
    def _failing_together(self, agreement: Agreement) -> Iterator[None]:
        """If the forward fails here, the other machines raise too, instead of waiting for its backward."""
        try:
            yield
        except BaseException as error:
            if self.tensors.sums.are_on and any(parameter.requires_grad for parameter in self._source.parameters()):
                agreement.signal_failure(error)
            raise

    @property
    def _source(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("the module of this state is gone")
        return module

    def _updated_twin(self, method: str) -> nn.Module:
        """The twin, which has the class that the module had before, with the current attributes of the module."""
        source, cls = self._source, type(self._twin.module)
        if type(source).__bases__[1:] != (cls,):
            raise RuntimeError(
                f"the class of this {cls.__name__} is another one than `replicate` gave to it, "
                f"{type(source).__name__}. What changes a module's class, as torch.nn.utils.parametrize does, has to "
                "come before `replicate`; on its children it may come at any time"
            )
        twin = self._twin.update(source, method)
        del vars(twin)[KEY]
        return twin
