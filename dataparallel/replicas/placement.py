"""`check_placement` checks that a module's tensors are on the root. The rest handles code with devices as constants.

Tracing bakes the device of the example inputs, and tensors on it, into graphs of ``torch.fx`` (exported programs too)
and ScriptModules. `constant_tensors`, `constant_devices` and `patched_forward` let a graph run on another device.
TorchScript code cannot be patched, so `refuse_script_constants` refuses such a ScriptModule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

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

    Raises:
        RuntimeError: a tensor is not on ``root``; the message names the tensor and says what to call.
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


# ---- graphs of torch.fx ----------------------------------------------------------------------------------------------


class _GraphConstants(NamedTuple):
    attribute_paths: tuple[str, ...]
    """Dotted names of the attributes that the graph reads: parameters, buffers and constant tensors."""
    devices: frozenset[torch.device]
    """The devices that the graph's code names."""


# Both caches are keyed by the graph's generated ``forward``: torch.fx makes a new function when a graph is recompiled.
_graph_constants: weakref.WeakKeyDictionary[Any, _GraphConstants] = weakref.WeakKeyDictionary()

_patched_forwards: weakref.WeakKeyDictionary[Any, dict[tuple[torch.device, torch.device], FunctionType]]
_patched_forwards = weakref.WeakKeyDictionary()
"""The results of `patched_forward`, by source and target device."""


def is_graph(module: nn.Module) -> bool:
    """True if torch.fx has generated the module's forward from a graph."""
    return isinstance(module, torch.fx.GraphModule)


def constant_tensors(module: Any, device: torch.device) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields module, attribute and tensor for each tensor on ``device`` that the graph reads from a plain attribute."""
    for path in _constants_of_graph(module).attribute_paths:
        holder_path, _, key = path.rpartition(".")
        try:
            holder = module.get_submodule(holder_path)
        except AttributeError:
            continue
        value = vars(holder).get(key)
        if isinstance(value, Tensor) and value.device == device:
            yield holder, key, value


def constant_devices(module: Any) -> frozenset[torch.device]:
    """Returns the devices that the graph's code names."""
    return _constants_of_graph(module).devices


def patched_forward(forward: Any, source: torch.device, target: torch.device) -> FunctionType:
    """Returns a copy of a graph's ``forward`` that uses ``target`` where its code names ``source``. Copies are cached.

    The code names devices as ``device(...)``. In the copy, the global ``device`` is a function that swaps the two.

    Raises:
        RuntimeError: the code names devices in another way.
    """
    copies = _patched_forwards.setdefault(forward, {})
    if (source, target) not in copies:
        if forward.__globals__.get("device") is not torch.device:
            raise RuntimeError(
                f"cannot replicate a graph of torch.fx to {target}: it names {source}, and in a way that this library "
                "does not know, so the replica would compute there. Wrap the module of which the graph was made"
            )

        def device(*args: Any, **kwargs: Any) -> torch.device:
            named = torch.device(*args, **kwargs)
            return target if named == source else named

        copy = FunctionType(forward.__code__, {**forward.__globals__, "device": device}, forward.__name__)
        copy.__defaults__, copy.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
        copies[source, target] = copy
    return copies[source, target]


def _constants_of_graph(module: Any) -> _GraphConstants:
    forward: Callable[..., Any] = type(module).forward
    if forward not in _graph_constants:
        paths = tuple(dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="get_attr")))
        devices: set[torch.device] = set()
        for node in module.graph.nodes:
            leaves = _torch.pytree.tree_leaves((node.args, node.kwargs))
            devices.update(leaf for leaf in leaves if isinstance(leaf, torch.device))
        _graph_constants[forward] = _GraphConstants(paths, frozenset(devices))
    return _graph_constants[forward]


# ---- ScriptModules ---------------------------------------------------------------------------------------------------

_script_constants: weakref.WeakKeyDictionary[Any, dict[torch.device, str]] = weakref.WeakKeyDictionary()
"""For each ScriptModule the devices of the constants in its code, with a description of one such constant."""


def refuse_script_constants(plan: ModulePlan, slots: Sequence[torch.device]) -> None:
    """Checks that each constant in a ScriptModule's code is on the device of all slots, or on the CPU.

    Raises:
        RuntimeError: a constant is not; the message names the ScriptModule and says what to do.
    """
    inside: set[int] = set()  # ids of modules whose code has been checked as part of their parent's
    for entry in plan.entries:
        if not entry.is_script or id(entry.module) in inside:
            continue
        inside.update(map(id, entry.module.modules()))
        for device, constant in _constants_of_script(entry.module).items():
            other = next((slot for slot in slots if slot != device), None)
            if other is not None and device != CPU:
                raise RuntimeError(
                    f"cannot replicate the ScriptModule {entry.name or 'at the root'!r} to {other}: {constant} on "
                    f"{device} is a constant of its code, because it was traced or frozen there. Wrap the module that "
                    "is not frozen, script it instead of tracing it, or make the tensor a buffer of the module before"
                )


def _constants_of_script(module: Any) -> dict[torch.device, str]:
    if module not in _script_constants:
        descriptions: dict[torch.device, str] = {}
        graph = getattr(module, "inlined_graph", None)  # ``None`` for a module without forward
        for node in [] if graph is None else graph.findAllNodes("prim::Constant"):
            kind = node.output().type().kind()
            if kind == "TensorType" and node.hasAttribute("value"):
                descriptions.setdefault(node.t("value").device, "a tensor")
            elif kind == "DeviceObjType" and node.hasAttribute("value"):
                descriptions.setdefault(torch.device(node.s("value")), "the name of a device")
        _script_constants[module] = descriptions
    return _script_constants[module]
