"""`ReplicateState` is what `replicate` keeps for one module: slots, and replicas that stay from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.call.engine import Method
from dataparallel.call.options import CallOptions
from dataparallel.forms.kept_tensors import KeptTensors
from dataparallel.forms.managed import StateOnSlots, Twin
from dataparallel.gradients.comm_hooks import CommHook, GradBucket, HookedSums
from dataparallel.replicas.compiled.calls import CompileArgument, call_of, compiled_here
from dataparallel.replicas.graphs.calls import GraphedReplicas
from dataparallel.replicas.kept_replicas import KeptReplicas
from dataparallel.replicas.plan import FORM_ATTRIBUTE, TwinInfo, check_placement
from dataparallel.replicas.replicate import cap_in_bytes

if TYPE_CHECKING:
    from dataparallel.machines.lanes import Lane, Machines


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
        from dataparallel.machines.peer_rounds import PeerRounds
        from dataparallel.machines.start import compare, describe, send_values

        source = self.source()
        ignored = {id(tensor) for module in self._twin_info.ignored_modules for tensor in module.buffers()}
        parameters = {name: each for name, each in source.named_parameters() if self.manages(each)}
        buffers = {name: each for name, each in source.named_buffers() if id(each) not in ignored}
        what = f"`replicate` of a {type(self._twin.module).__name__}"
        sent_from = {"device of the first slot": self.machines.names_of(self.slots[:1])[0]}
        compare(self.machines, what, describe(parameters, buffers, self.slots, sent_from | self._settings))
        self._lane = self.machines.lane("steps")
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
