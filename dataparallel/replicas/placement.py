"""`check_placement` checks that a module's tensors are on the root, `refuse_constants` that no code is bound to it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.devices import CPU

if TYPE_CHECKING:
    from dataparallel.replicas.plan import ModulePlan


def check_placement(
    module: nn.Module,
    root: torch.device,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[int] = (),
) -> None:
    """Checks every parameter and buffer, except ``ignored_parameters`` (ids) and tensors of ``ignored_modules``.

    For a module that runs without replicas. Where replicas are made, `KeptReplicas` checks the tensors of their plan.
    """
    # Not by `named_modules`, which takes three times as long: this runs at each call.
    seen, modules = {*map(id, ignored_modules)}, [module]
    for submodule in modules:
        if id(submodule) in seen:
            continue
        seen.add(id(submodule))
        for registry in (submodule._parameters, submodule._buffers):
            for tensor in registry.values():
                if tensor is not None and tensor.device != root and id(tensor) not in ignored_parameters:
                    raise placement_error(_name_of(tensor, module), tensor, root)
        modules += (child for child in submodule._modules.values() if child is not None)


def _name_of(tensor: Tensor, module: nn.Module) -> str:
    named = ("parameter", module.named_parameters()), ("buffer", module.named_buffers())
    return next(f"{kind} {name!r}" for kind, tensors in named for name, each in tensors if each is tensor)


def placement_error(tensor_name: str, tensor: Tensor, root: torch.device) -> RuntimeError:
    """Returns the error for a tensor that is not on ``root``."""
    # People search for torch.nn.DataParallel's message, so this one begins in the same words.
    first_sentence = (
        f"module must have its parameters and buffers on device {root} (device_ids[0]) but found one of them "
        f"on device: {tensor.device}. "
    )
    if tensor.device.type == "meta":
        return RuntimeError(
            f"{first_sentence}It is {tensor_name}, which has no values there; materialise it first: call "
            f"module.to_empty(device={str(root)!r}), then load a state dict or initialise all parameters and buffers"
        )
    return RuntimeError(f"{first_sentence}It is {tensor_name}; call module.to({str(root)!r}) before the forward")


# ---- code with devices as constants ----------------------------------------------------------------------------------

_constants: weakref.WeakKeyDictionary[Any, dict[torch.device, str]] = weakref.WeakKeyDictionary()
"""For each ScriptModule, and each ``forward`` that torch.fx has generated, the devices of the constants in its code,
with a description of one such constant. torch.fx makes a new ``forward`` when a graph is recompiled."""


def refuse_constants(plan: ModulePlan, slots: Sequence[torch.device]) -> None:
    """Checks that each constant in the code of ScriptModules and graphs is on the device of all slots, or on the CPU.

    Tracing and exporting bake the device of the example inputs, and tensors on it, into the code.
    """
    inside: set[int] = set()  # ids of modules whose code has been checked as part of their parent's
    for entry in plan.entries:
        if id(entry.module) in inside:
            continue
        if entry.is_script:
            inside.update(map(id, entry.module.modules()))
            constants, what, how = _constants_of_script(entry.module), "ScriptModule", "frozen"
        elif isinstance(entry.module, torch.fx.GraphModule):
            constants, what, how = _constants_of_graph(entry.module), "graph", "exported"
        else:
            continue
        for device, constant in constants.items():
            other = next((slot for slot in slots if slot != device), None)
            if other is not None and device != CPU:
                raise RuntimeError(
                    f"cannot replicate the {what} {entry.name or 'at the root'!r} to {other}: {constant} on "
                    f"{device} is a constant of its code, because it was traced or {how} there. Wrap the module of "
                    f"which the {what} was made, or make the tensor a buffer of that module before"
                )


def _constants_of_script(module: Any) -> dict[torch.device, str]:
    if module not in _constants:
        descriptions: dict[torch.device, str] = {}
        graph = getattr(module, "inlined_graph", None)  # ``None`` for a module without forward
        for node in [] if graph is None else graph.findAllNodes("prim::Constant"):
            kind = node.output().type().kind()
            if kind == "TensorType" and node.hasAttribute("value"):
                descriptions.setdefault(node.t("value").device, "a tensor")
            elif kind == "DeviceObjType" and node.hasAttribute("value"):
                descriptions.setdefault(torch.device(node.s("value")), "the name of a device")
        _constants[module] = descriptions
    return _constants[module]


def _constants_of_graph(module: Any) -> dict[torch.device, str]:
    forward = type(module).forward
    if forward not in _constants:
        descriptions: dict[torch.device, str] = {}
        for node in module.graph.nodes:
            for leaf in _torch.pytree.tree_leaves((node.args, node.kwargs)):
                if isinstance(leaf, torch.device):
                    descriptions.setdefault(leaf, f"the name of a device in {node.name!r}")
        for node in module.graph.find_nodes(op="get_attr"):
            holder, _, key = str(node.target).rpartition(".")
            value = vars(module.get_submodule(holder)).get(key)  # a parameter or buffer is in a registry
            if isinstance(value, Tensor):
                descriptions.setdefault(value.device, f"the tensor {node.target!r}")
        _constants[forward] = descriptions
    return _constants[forward]
