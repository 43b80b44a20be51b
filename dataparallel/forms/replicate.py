"""`replicate` makes a module itself run on all slots, without a wrapper.

`ReplicatedModule` is the class that the module gets, `ReplicateState` has its slots and replicas, which stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.arguments import checked, listed
from dataparallel.call.engine import Method
from dataparallel.call.options import CallOptions, ReplicateOptions, completed, takes
from dataparallel.devices import CPU, resolve_slots
from dataparallel.forms.form import Form
from dataparallel.forms.kept_tensors import KeptTensors
from dataparallel.forms.managed import ManagedModule, SlotsMethod, StateOnSlots, Twin, check_runs, state_of
from dataparallel.gradients.comm_hooks import CommHook, GradBucket, HookedSums
from dataparallel.nn.sync_batch_norm import prepare
from dataparallel.replicas.compiled.calls import CALL, CompileArgument, call_of, compiled_here
from dataparallel.replicas.graphs.calls import GraphedReplicas, check_graphs
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.replicas.plan import FORM_ATTRIBUTE, TwinInfo, check_placement
from dataparallel.replicas.replicate import cap_in_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dataparallel.machines.lanes import Lane, Machines


class _CallOfReplicas:
    """Hides the call that ``module.compile()`` sets from the module, and stores it for replicas.

    With it the module's own call would run compiled code. It is no property: ``torch.jit.script`` compiles properties.
    """

    @_torch.leave_alone
    def __get__(self, module: Any, cls: type) -> None:
        return None

    def __set__(self, module: Any, call: Any) -> None:
        vars(module)[CALL] = call


class ReplicatedModule(ManagedModule):
    """The class that `replicate` adds to the class of a module."""

    forward: Any = SlotsMethod("forward")
    _compiled_call_impl: Any = _CallOfReplicas()

    def set_requires_gradient_sync(self, flag: bool) -> None:
        """With ``True`` each later ``backward()`` sums gradients into the module's parameters, as at the beginning.

        With ``False`` gradients stay on the slots: slot 0's gradients are added to a parameter's ``.grad``, and the
        next ``backward()`` with ``True`` adds the others. With several machines, or a communication hook, that backward
        also sends on the gradients that ``.grad`` has got meanwhile. If you set a ``.grad`` to ``None``, to another
        tensor or to zeros (``zero_grad()``), its waiting gradients are thrown away. The module looks for this at its
        next forward or backward. It does not notice a backward that does not lead through the module, for example of a
        loss on its parameters alone. Let no such backward come between.
        """
        state_of(self).tensors.sums.are_on = checked("flag", flag, bool)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block each ``backward()`` leaves gradients on the slots: see `set_requires_gradient_sync`."""
        tensors = state_of(self).tensors
        before, tensors.sums.are_on = tensors.sums.are_on, False
        try:
            yield
        finally:
            tensors.sums.are_on = before

    @contextmanager
    def frozen(self) -> Iterator[ReplicatedModule]:
        """For serving: inside the block replicas stay as they are, and nothing is sent. See `WrapperOptions.frozen`.

        It begins and ends with new replicas. Gradients that wait on the slots are kept.
        """
        with state_of(self).kept.frozen():
            yield self

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """From the next forward on, ``hook(state, bucket)`` says what becomes of the gradients after the slots.

        As with ``torch.nn.parallel.DistributedDataParallel``, whose hooks run unchanged here. Each backward that sums
        gradients calls the hook once for each bucket, one after the other, in the order of their `GradBucket.index`,
        which is the same on all machines. It gets the sum over the slots of this process, not divided by anything, and
        returns a ``torch.futures.Future`` of a tensor like ``bucket.buffer()``. That tensor has the gradients: nothing
        is added over machines besides, and ``average`` has no effect. torch's hooks divide by the number of ranks.

        :ref:`communication-hooks` says when and where hooks are called, what is in a bucket, and what comes of a hook
        that raises.

        Args:
            state: is given to each call.
            hook: the same on all machines. A backward raises where its name differs.

        Raises:
            TypeError: ``hook`` cannot be called.
            RuntimeError: the module has a hook already; or it just runs, because there is no accelerator.
        """
        state_of(self).register_comm_hook(state, hook)


class ReplicateState(StateOnSlots):
    """The state of one module. ``given``: the arguments of `replicate`.

    Attributes:
        graphs: the captured graphs of the replicas; ``None`` without ``graphs=True``.
        machines: those over which gradients are summed too; ``None`` for this machine alone.
    """

    def __init__(
        self,
        module: nn.Module,
        options: CallOptions,
        given: dict[str, Any],
        *,
        ignored_modules: Sequence[nn.Module],
        ignored_parameters: Sequence[Tensor],
        machines: Machines | None,
        compile: CompileArgument | None,
        graphs: bool,
    ) -> None:
        super().__init__([module], options)
        self._ignored = (*ignored_modules, *ignored_parameters)  # else other objects could get their ids
        self._twin_info = TwinInfo(
            id(module), frozenset(ignored_modules), frozenset(id(parameter) for parameter in ignored_parameters)
        )
        self._twin = Twin(type(module), self._twin_info)
        self.machines = machines
        first_bytes, sends_buffers = cap_in_bytes(given["first_bucket_mb"]), given["broadcast_buffers"]
        # The same on all machines.
        alike = {name: given[name] for name in ("broadcast_buffers", "average", "sync_batch_norm")}
        self._settings = {"first_bytes": first_bytes, "cap_bytes": options.cap_bytes, **alike}
        self._lane: Lane | None = None  # of the steps of this module, over machines
        self._hook: CommHook | None = None
        self.tensors = KeptTensors(self.slots, first_bytes, options.cap_bytes, sends_buffers)
        self._compile = compile
        self.graphs = GraphedReplicas() if graphs else None
        self.kept = KeptReplicas(self.tensors, compile, graphs=self.graphs)

    def manages(self, parameter: Tensor) -> bool:
        return id(parameter) not in self._twin_info.ignored_parameters

    # ---- methods of `ReplicaMaker` -----------------------------------------------------------------------------------

    def others_wait(self, is_recorded: bool) -> bool:
        """See `StateOnSlots`. They wait for the backward."""
        return (
            is_recorded and self.tensors.sums.are_on and any(each.requires_grad for each in self.source().parameters())
        )

    def check(self, slots: Sequence[torch.device]) -> None:
        if len(slots) == 1:
            check_placement(
                self.source(), slots[0], self._twin_info.ignored_modules, self._twin_info.ignored_parameters
            )

    def needs_no_replica(self) -> bool:
        """Replicas send the gradients of a recorded call to other machines or to a hook, and replicas launch graphs."""
        return self.graphs is None and (not torch.is_grad_enabled() or self.tensors.passes is None)

    def alone(self, method: Method) -> Callable[..., Any]:
        """Returns the function that runs ``method`` without replicas. It is compiled from the twin if replicas are."""
        # Where dynamo is compiling, it compiles code that calls the module.
        if torch.compiler.is_dynamo_compiling() or method.name != "forward" or not _torch.is_compiler_loaded():
            return method.of_module
        twin = self._updated_twin(method.name)
        root = compiled_here(twin) if self._compile is None else self._compile.of(twin)
        return method.of_module if root is None or root.child is not None else call_of(twin, root)

    def replicas(self, method: Method, lent: Any, slots: list[torch.device]) -> list[Any]:
        with self.kept.lock:  # calls of several threads share the twin
            return self.replicate(self._updated_twin(method.name), slots)

    def replicate(self, source: nn.Module, slots: list[torch.device]) -> list[Any]:
        """The stage that makes replicas; override it on this object to make them in another way."""
        return self.kept.replicas(source, slots, self.options.cap_bytes)

    @property
    def may_use_source(self) -> bool:  # type: ignore[override]
        return getattr(self.replicate, "__func__", None) is not ReplicateState.replicate

    def returns(self, output: Any) -> None:
        """Makes a recorded output notice the backward in which gradients are reduced."""
        if torch.is_grad_enabled() and self.tensors.passes is not None:
            self.tensors.passes.notice_passes_of(output)

    # ---- machines and hooks ------------------------------------------------------------------------------------------

    def join_machines(self) -> None:
        """Compares the module with that of the other machines, and gives it the values of rank 0."""
        if self.machines is None:
            return
        from dataparallel.gradients.machine_sums import MachineSums
        from dataparallel.machines.lanes import Lane
        from dataparallel.machines.peer_rounds import PeerRounds
        from dataparallel.machines.start import compare, describe, send_values

        source = self.source()
        ignored = {id(tensor) for module in self._twin_info.ignored_modules for tensor in module.buffers()}
        parameters = {name: each for name, each in source.named_parameters() if self.manages(each)}
        buffers = {name: each for name, each in source.named_buffers() if id(each) not in ignored}
        what = f"`replicate` of a {type(self._twin.module).__name__}"
        sent_from = {"device of the first slot": self.machines.names_of(self.slots[:1])[0]}
        compare(self.machines, what, describe(parameters, buffers, self.slots, sent_from | self._settings))
        self._lane = Lane(self.machines, "steps")
        self.peers = PeerRounds(self.machines)
        self.machines.make_communicators(self.slots[:1])
        send_values(self._lane, {**parameters, **buffers})
        self.tensors.reduce_by(MachineSums(self._lane, self._settings["average"]), self._lane)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
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
        if self._lane is None:
            self.tensors.reduce_by(HookedSums(registered))
        else:
            from dataparallel.gradients.machine_sums import MachineSums

            self.tensors.reduce_by(MachineSums(self._lane, self._settings["average"], registered))
        self._hook = registered

    def _updated_twin(self, method: str) -> nn.Module:
        source, cls = self.source(), type(self._twin.module)
        if type(source).__bases__[1:] != (cls,):
            raise RuntimeError(
                f"the class of this {cls.__name__} is another one than `replicate` gave to it, "
                f"{type(source).__name__}. What changes a module's class, as torch.nn.utils.parametrize does, has to "
                "come before `replicate`; on its children it may come at any time"
            )
        return self._twin.update(source, method, left_out=FORM_ATTRIBUTE)


@takes(ReplicateOptions)
def _prepare(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    **options: Unpack[ReplicateOptions],
) -> ReplicateState:
    """Makes ``module`` run on all devices, in place: splits the batch, runs a replica on each slot, joins the outputs.

    The module stays the same object with the same parameters, so optimizers, ``state_dict`` and the training loop are
    those of one device. Its class becomes a subclass of `ReplicatedModule` and of its former class. The devices of its
    parameters are checked at each call, so it may be moved, loaded or materialised before. Hooks on the module itself
    run once per call, on the whole batch; hooks on submodules run in each replica. ``replicate.state(module)`` returns
    its state.

    :doc:`/guide/machines` says what ranks have to do alike, and what happens where they do not.

    While one thread calls the module, ``backward()`` may run in another thread only if that thread calls the module
    too. A call writes current values into the replicas, which the backward of the other thread may still read.

    Args:
        module: a module that has a ``forward`` and no form yet. It has to be on the first slot when it is called.
        ignored_modules: modules below it that replicas share, with all their parameters: these are not copied and their
            gradients are not summed. You make sure that several threads can use them at the same time, with tensors
            on the device of each slot.
        ignored_params: single parameters that replicas share.
        <options>
        bucket_cap_mb: size in MiB of the buckets in which parameters travel, and their gradients back.
        first_bucket_mb: size in MiB of the bucket whose gradients come first.
        broadcast_buffers: if true, replicas get the module's buffers at each call, else only when they are made. Over
            machines each forward that is recorded begins with the buffers of rank 0.
        process_group: a group of torch.distributed over which the module is replicated too, with one process for each
            machine. Default: this process alone.
        mesh: a ``DeviceMesh`` of one dimension over such processes, instead of a group.
        average: over R machines, ``p.grad = (1/R) * sum_r dL_r/dp``, where ``L_r`` is the loss of rank r and
            ``dL_r/dp`` is summed over its slots: so a loss that is the mean of each machine's batch is that of
            DistributedDataParallel. If false, without the factor 1/R.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, has no ``forward``, or is a wrapper or a ScriptModule; an option or an
            entry of ``ignored_modules`` or ``ignored_params`` has another type.
        MachinesDiffer: on every rank, if the modules, slots or arguments of the machines differ.
        ValueError: devices and BatchNorms as for `dataparallel.DataParallel`; a bucket size is not above 0; a module or
            parameter to ignore is no part of ``module``; ``compile`` is given for a compiled module.
        RuntimeError: the module, a parent, a child or one of its parameters has a form already.
    """
    process_group, mesh = options.get("process_group"), options.get("mesh")
    machines: Machines | None = None
    together: AbstractContextManager[object] = nullcontext()
    if process_group is not None or mesh is not None:
        # Only here: a module on one machine needs no torch.distributed.
        from dataparallel.machines.arguments import machines_of
        from dataparallel.machines.start import failing_together

        (machines,) = machines_of(process_group, mesh)
        together = failing_together(machines)
    with together:
        _check_kind(module)
        given = completed(ReplicateOptions, options, "replicate")
        sync_batch_norm = given["sync_batch_norm"]
        slots = resolve_slots(given["device_ids"], given["devices"]) or ([] if machines is None else [CPU])
        call_options = CallOptions(slots, given)
        compiled = CompileArgument.checked(module, given["compile"])
        has_graphs = check_graphs(given["graphs"], [module], compiled, slots)
        modules, parameters = _check_ignored(module, ignored_modules, given["ignored_params"])
        synchronised = any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())
        if machines is not None and len(slots) > 1 and synchronised and not sync_batch_norm:
            raise ValueError(
                f"the {type(module).__name__} has a torch.nn.SyncBatchNorm and {len(slots)} slots: the slots of one "
                'process would call collectives of one group at the same time. Pass sync_batch_norm="across_machines", '
                "or use one slot for each process"
            )
        prepare(module, sync_batch_norm, slots, machines is not None)  # converts: after all checks, before the twin
        return ReplicateState(
            module,
            call_options,
            given,
            ignored_modules=modules,
            ignored_parameters=parameters,
            machines=machines,
            compile=compiled,
            graphs=has_graphs,
        )


_prepare.__name__ = _prepare.__qualname__ = "replicate"
replicate: Final = Form(_prepare, ReplicatedModule, begin=lambda modules, state: state.join_machines())


def _check_kind(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"cannot replicate a {type(module).__name__} in place: the class of a ScriptModule belongs to TorchScript "
            "and cannot be changed. Replicate what is not scripted, or wrap this one in dataparallel.DataParallel"
        )
    check_runs(module, "replicate")


def _check_ignored(
    module: nn.Module, ignored_modules: Iterable[nn.Module] | None, ignored_params: Iterable[Tensor] | None
) -> tuple[list[nn.Module], list[Tensor]]:
    modules = listed("ignored_modules", ignored_modules, nn.Module, "; slots are named: devices=[...]")
    parameters = listed("ignored_params", ignored_params, Tensor)
    below = {id(child) for child in module.modules()} - {id(module)}
    own = {id(parameter) for parameter in module.parameters()}
    for i, child in enumerate(modules):
        if id(child) not in below:
            raise ValueError(f"ignored_modules[{i}], a {type(child).__name__}, is not below the module to replicate")
    for i, parameter in enumerate(parameters):
        if id(parameter) not in own:
            raise ValueError(f"ignored_params[{i}] is no parameter of the module to replicate")
    return modules, [*parameters, *(parameter for child in modules for parameter in child.parameters())]
