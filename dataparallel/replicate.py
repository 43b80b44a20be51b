"""One module -> one copy per device, from a plan; which modules can be replicated is ``module_plan``'s to say.

Replicas are fresh at every call and see whatever the source is then. Their parameters are outputs of one
differentiable broadcast, so gradients are summed back into the source by its backward. Replica 0 shares the storage of
the source's parameters and buffers; other replicas on its device share the parameters and own their buffers. Running
replicas is ``parallel_apply``'s business.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dataparallel import comm
from dataparallel.buckets import PLAIN_TYPES
from dataparallel.devices import DeviceLike, resolve_slots
from dataparallel.functions import Broadcast, alias
from dataparallel.module_plan import HOOK_TABLES, MADE, ModuleEntry, ModulePlan, dotted
from dataparallel.module_references import Rebinding
from dataparallel.replica_cycles import note_circles

__all__ = ["ReplicaParameter", "replicate"]

M = TypeVar("M", bound=nn.Module)


class ReplicaParameter(torch.Tensor):
    """A parameter of a replica: ``isinstance(p, nn.Parameter)`` holds, but it is an output of the broadcast.

    It is no leaf, so what is meant for a model's own parameters is refused on it with a sentence.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _is_param = True

    def requires_grad_(self, requires_grad: bool = True) -> ReplicaParameter:
        """Refused, unless it asks for what is."""
        self.requires_grad = requires_grad
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to the source's parameter."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        if requires_grad != self.requires_grad:
            raise RuntimeError(
                f"cannot set requires_grad={requires_grad} on a parameter of a replica: it is a copy made by the "
                "broadcast, not a leaf. Set it on the source module before its forward"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise RuntimeError(
            "cannot deepcopy a parameter of a replica: it is a copy made by the broadcast, not a leaf, and belongs to "
            "one forward. Copy the source module outside forward, or take parameter.detach().clone()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


PLAIN_TYPES.add(ReplicaParameter)  # a wrapper inside a wrapped module sends replicas' parameters on


def replicate(network: M, devices: Sequence[DeviceLike], detach: bool = False) -> list[M]:
    """A copy of ``network`` for each of ``devices``; its parameters and buffers should be on the first of them.

    Args:
        network: a module without uninitialised parameters, compiled modules, or Python modules below ScriptModules.
        devices: the slots; a device may be listed more than once.
        detach: copies without autograd.

    Returns:
        The replicas, in slot order. Parameters that need gradients are outputs of one `Broadcast`; where gradients are
        not being recorded they are leaves that need them too, for a ``forward`` that turns recording on again.

    Raises:
        RuntimeError: the tree cannot be replicated; the message names the module.
        TypeError, ValueError: devices as in ``dataparallel.devices.resolve_slots``.
    """
    slots = resolve_slots(devices)
    plan = ModulePlan.of(network)
    record = torch.is_grad_enabled() and not detach
    copies = _copy_tensors(plan, slots, record)
    if not record and not detach and not torch.is_inference_mode_enabled():
        needed = [i for i, known in enumerate(plan.is_parameter) if known and plan.tensors[i].requires_grad]
        for tensors in copies:
            for i in needed:
                tensors[i].requires_grad_()
    return [_build(plan, tensors, record) for tensors in copies]


def _copy_tensors(plan: ModulePlan, slots: list[torch.device], record: bool) -> list[list[Tensor]]:
    """The plan's tensors for each slot."""
    recorded = [i for i, tensor in enumerate(plan.tensors) if record and tensor.requires_grad]
    rest = set(range(len(plan.tensors))).difference(recorded)
    constant = [i for i in sorted(rest) if plan.is_parameter[i]]
    buffers = [i for i in sorted(rest) if not plan.is_parameter[i]]
    copies: list[list[Tensor]] = [list(plan.tensors) for _ in slots]
    if recorded:
        outputs = Broadcast.apply(slots, *(plan.tensors[i] for i in recorded))
        for slot, on_slot in enumerate(copies):
            for k, i in enumerate(recorded):
                output = outputs[slot * len(recorded) + k]
                own = slot > 0 and not plan.is_parameter[i]
                on_slot[i] = output.clone() if own else output
    for indices, own in ((constant, False), (buffers, True)):
        sent = comm.broadcast_coalesced([plan.tensors[i] for i in indices], slots, own_storage=own) if indices else []
        for slot, tensors in enumerate(sent):
            for i, tensor in zip(indices, tensors, strict=True):
                # A parameter that no graph records still is a tensor of the replica's own.
                copies[slot][i] = alias(tensor, slot) if plan.is_parameter[i] else tensor
    return copies


def _build(plan: ModulePlan, tensors: list[Tensor], record: bool) -> Any:
    """One replica of the plan's tree around ``tensors``."""
    parameter_class = ReplicaParameter if record else nn.Parameter
    for tensor, is_parameter in zip(tensors, plan.is_parameter, strict=True):
        if is_parameter and type(tensor) is Tensor:
            # The object stays what the broadcast returned, graph included; only its Python class changes.
            tensor.__class__ = parameter_class
    modules = [_shell(entry) for entry in plan.entries]
    for entry, module in zip(plan.entries, modules, strict=True):
        _fill(entry, module, modules, tensors)
    if any(entry.references for entry in plan.entries):
        _point_attributes(plan, modules, tensors)
    return modules[0]


def _point_attributes(plan: ModulePlan, modules: list[nn.Module], tensors: list[Tensor]) -> None:
    """Points what attributes outside of the registries hold at the replica."""
    table: dict[int, Any] = {id(entry.module): module for entry, module in zip(plan.entries, modules, strict=True)}
    table.update({id(source): tensor for source, tensor in zip(plan.tensors, tensors, strict=True)})
    rebinding = Rebinding(table)
    for entry, module in zip(plan.entries, modules, strict=True):
        attributes = vars(module)
        for key in entry.references:
            if key in attributes:
                try:
                    attributes[key] = rebinding.rebound(attributes[key])
                except Exception as error:
                    raise RuntimeError(
                        f"cannot replicate {dotted(entry.name, key)!r}: it refers to modules of the tree, and another "
                        f"{type(attributes[key]).__name__} that refers to their replicas could not be built"
                    ) from error
    if plan.may_hold_cycles:
        note_circles(modules[0], rebinding.made)


def _shell(entry: ModuleEntry) -> nn.Module:
    """A module of the same class with the same attributes, and nothing yet in its registries."""
    source = entry.module
    attributes = vars(source)
    if entry.has_own_rule:
        replica = source._replicate_for_data_parallel()
        # What its rule leaves out comes along, but for methods of a ScriptModule, which are bound to the source.
        left_out = attributes.keys() - vars(replica).keys()
        methods = torch._C.ScriptMethod
        vars(replica).update({key: attributes[key] for key in left_out if not isinstance(attributes[key], methods)})
        if isinstance(source, torch.jit.ScriptModule):
            return replica
    else:
        replica = _bare(type(source))
        vars(replica).update(attributes)
    own = vars(replica)
    own["_is_replica"] = True
    own.pop(MADE, None)
    own["_non_persistent_buffers_set"] = set(attributes["_non_persistent_buffers_set"])
    for name in HOOK_TABLES:
        own[name] = attributes[name].copy() if attributes[name] else OrderedDict()
    for name in entry.slots:
        if hasattr(source, name):
            setattr(replica, name, getattr(source, name))
    return replica


def _bare(cls: type[nn.Module]) -> nn.Module:
    try:
        return object.__new__(cls)  # a class's own may want arguments
    except TypeError:  # a class that is also a built-in type
        return cls.__new__(cls)


def _fill(entry: ModuleEntry, replica: nn.Module, modules: list[nn.Module], tensors: list[Tensor]) -> None:
    """Puts the replica's own tensors and children where the source has its."""
    parameters = {key: None if i is None else tensors[i] for key, i in entry.parameters.items()}
    buffers = {key: None if i is None else tensors[i] for key, i in entry.buffers.items()}
    children = {key: None if i is None else modules[i] for key, i in entry.children.items()}
    if isinstance(replica, torch.jit.ScriptModule):
        # Its registries are views of a C++ object, which is written through attributes.
        for key, tensor in {**parameters, **buffers}.items():
            if tensor is not None:
                setattr(replica, key, tensor)
        for key, child in children.items():
            replica._modules[key] = child
        return
    for key in entry.proxied:
        children[key] = weakref.proxy(children[key])  # type: ignore[assignment]
    attributes = vars(replica)
    attributes["_parameters"] = parameters
    attributes["_buffers"] = buffers
    attributes["_modules"] = children
