"""The state that `replicate` keeps for one module: its slots, its replicas, and how a call of it runs on them.

A call of the module arrives in `ReplicateState.run` and goes through the four stages. Replicas are made from a twin: an
object of the original class with all attributes of the module. Only ``composable.replicate`` makes states.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.composable.managed import KEY
from dataparallel.composable.on_slots import Method
from dataparallel.composable.persistent_tensors import PersistentTensors
from dataparallel.composable.twins import Twin
from dataparallel.devices import DeviceLike, resolve, resolve_output
from dataparallel.kept.replicas import KeptReplicas
from dataparallel.modules.placement import check_placement
from dataparallel.modules.plan import TwinInfo
from dataparallel.parallel_apply import run_replicas
from dataparallel.profiling import stage
from dataparallel.scatter_gather import gather, scatter_arguments
from dataparallel.stages import Call, run_alone
from dataparallel.structures import arguments_of_one
from dataparallel.threads.permits import PermitChooser

__all__ = ["ReplicateState"]


class ReplicateState:
    """The state of one module. It refers to the module weakly, and to ignored modules and parameters strongly.

    Args:
        module: a module that is not replicated yet; replicas get its class.
        slots: the slots; none if there is no accelerator.
        cap_bytes, first_bytes: sizes of the buckets, and of the bucket whose gradients come first.

    Attributes:
        methods: names of methods that run on replicas.
        tensors: the tensors of the replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[torch.device],
        *,
        output_device: DeviceLike | None,
        dim: int,
        cap_bytes: int,
        first_bytes: int,
        broadcast_buffers: bool,
        ignored_modules: Sequence[nn.Module] = (),
        ignored_parameters: Sequence[Tensor] = (),
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
        self.tensors = PersistentTensors(self.slots, first_bytes, cap_bytes, broadcast_buffers)
        self._kept = KeptReplicas(self.tensors)

    def manages(self, parameter: Tensor) -> bool:
        """True if replicas have copies of it."""
        return id(parameter) not in self._twin_info.ignored_parameters

    def run(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``method`` for the whole batch, on the output device.

        Raises:
            RuntimeError: a parameter or buffer is not on the first slot; a replica cannot be made or run here.
            ValueError: inputs cannot be split or outputs cannot be joined; the message names the place.
            Exception: a replica raised it.
        """
        if not self.slots:
            inputs, kwargs = arguments_of_one(inputs, kwargs)
            return method.of_module(*inputs, **kwargs)
        # torch.compile does not trace the stages. `_run_not_traced` imports the compiler, so only if that is loaded.
        run = _run_not_traced if _torch.is_compiler_loaded() else ReplicateState._run
        return run(self, method, inputs, kwargs)

    def _run(self, method: Method, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The checks before the four stages, and the context around them."""
        slots = [resolve(device) for device in self.slots]
        output_device = resolve_output(self.output_device, slots)
        check_placement(self._source, slots[0], self._twin_info.ignored_modules, self._twin_info.ignored_parameters)
        overridden = getattr(self.replicate, "__func__", None) is not ReplicateState.replicate
        with Call(slots, self._kept, may_use_source=overridden) as call:
            return self._stages(call, slots, output_device, method, inputs, kwargs)

    def _stages(
        self,
        call: Call,
        slots: list[torch.device],
        output_device: torch.device,
        method: Method,
        inputs: Any,
        kwargs: Any,
    ) -> Any:
        """The four stages. ``inputs`` and ``kwargs`` are those of the batch, then a tuple with one entry per slot."""
        with stage("scatter"):
            inputs, kwargs = scatter_arguments(inputs, kwargs, slots, self.dim, None, call.reads)
        if not inputs and not kwargs:  # a call without arguments
            inputs, kwargs = ((),), ({},)
        if len(slots) == 1:
            return run_alone(method.of_module, inputs[0], kwargs[0], slots[0], output_device)
        slots = slots[: len(inputs)]
        with stage("replicate"), call.replicates():
            replicas = call.uses(self.replicate(self._updated_twin(method.name), slots))
        with stage("parallel_apply"):
            outputs = run_replicas(replicas, inputs, kwargs, slots, chooser=self._permits, method=method.name)
        with stage("gather"):
            return gather(outputs, output_device, self.dim)

    def replicate(self, source: nn.Module, slots: list[torch.device]) -> list[Any]:
        """The stage that makes replicas; override it on this object to make them in another way."""
        return self._kept.replicas(source, slots, self.cap_bytes)

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


_run_not_traced = _torch.not_traced(ReplicateState._run)
