"""What of a module is bound to one device: its tensors, and code in which devices or tensors are constants.

Graphs of ``torch.fx``, as exported programs have them, and traced ScriptModules have the device of the example where
the module asked an input for its device, and a tensor where the module made one. A replica of a graph gets its own of
both. TorchScript owns its code, so there it is refused.
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
    """Checks every parameter and buffer, except ``ignored_parameters`` (ids) and those below ``ignored_modules``.

    Raises:
        RuntimeError: one is not on ``root``; the message names it and says what to call.
    """
    for name, submodule in module.named_modules(memo={*ignored_modules}):
        for registry in (submodule._parameters, submodule._buffers):
            for key, tensor in registry.items():
                if tensor is not None and tensor.device != root and id(tensor) not in ignored_parameters:
                    kind = "parameter" if registry is submodule._parameters else "buffer"
                    path = f"{name}.{key}" if name else key
                    raise _misplaced(f"{kind} {path!r}", tensor, root)


def _misplaced(what: str, tensor: Tensor, root: torch.device) -> RuntimeError:
    # The first sentence is torch.nn.DataParallel's, which people search for.
    words = (
        f"module must have its parameters and buffers on device {root} (device_ids[0]) but found one of them "
        f"on device: {tensor.device}. "
    )
    if tensor.device.type == "meta":
        return RuntimeError(
            f"{words}It is {what}, which has no values there; materialise it first: call "
            f"module.to_empty(device={str(root)!r}), then load a state dict or initialise all parameters and buffers"
        )
    return RuntimeError(f"{words}It is {what}; call module.to({str(root)!r}) before the forward")


# ---- code of graphs --------------------------------------------------------------------------------------------------


class _Named(NamedTuple):
    names: tuple[str, ...]
    """Names of what the graph reads from its module: parameters, buffers and constants, at any depth."""
    devices: frozenset[torch.device]
    """The devices that the graph names."""


_known: weakref.WeakKeyDictionary[Any, _Named] = weakref.WeakKeyDictionary()
"""By the function that torch.fx has made of the graph: it makes another one where a graph is compiled anew."""

_on_devices: weakref.WeakKeyDictionary[Any, dict[tuple[torch.device, torch.device], FunctionType]]
_on_devices = weakref.WeakKeyDictionary()
"""What `forward_on` has made of such a function."""


def is_graph(module: nn.Module) -> bool:
    """True if the module's forward is the code of a graph of ``torch.fx``."""
    return isinstance(module, torch.fx.GraphModule)


def constants_of(module: Any, device: torch.device) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Tensors on ``device`` that the graph reads from plain attributes: who has it, under which name, the tensor."""
    for path in _read(module).names:
        owner, _, key = path.rpartition(".")
        try:
            holder = module.get_submodule(owner)
        except AttributeError:
            continue
        value = vars(holder).get(key)
        if isinstance(value, Tensor) and value.device == device:
            yield holder, key, value


def devices_of(module: Any) -> frozenset[torch.device]:
    """The devices that the graph names."""
    return _read(module).devices


def forward_on(forward: Any, source: torch.device, target: torch.device) -> FunctionType:
    """The code of a graph that names ``source``, for replicas on ``target``: the same function each time.

    The code names devices as ``device(...)``, and in the function that is returned that name means another function.

    Raises:
        RuntimeError: it names devices in another way.
    """
    made = _on_devices.setdefault(forward, {})
    if (source, target) not in made:
        if forward.__globals__.get("device") is not torch.device:
            raise RuntimeError(
                f"cannot replicate a graph of torch.fx to {target}: it names {source}, and in a way that this library "
                "does not know, so the replica would compute there. Wrap the module of which the graph was made"
            )

        def device(*args: Any, **kwargs: Any) -> torch.device:
            named = torch.device(*args, **kwargs)
            return target if named == source else named

        code = FunctionType(forward.__code__, {**forward.__globals__, "device": device}, forward.__name__)
        code.__defaults__, code.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
        made[source, target] = code
    return made[source, target]


def _read(module: Any) -> _Named:
    forward: Callable[..., Any] = type(module).forward
    if forward not in _known:
        names = tuple(dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="get_attr")))
        devices: set[torch.device] = set()
        for node in module.graph.nodes:
            leaves = _torch.pytree.tree_leaves((node.args, node.kwargs))
            devices.update(leaf for leaf in leaves if isinstance(leaf, torch.device))
        _known[forward] = _Named(names, frozenset(devices))
    return _known[forward]


# ---- ScriptModules ---------------------------------------------------------------------------------------------------

_constants_of_scripts: weakref.WeakKeyDictionary[Any, dict[torch.device, str]] = weakref.WeakKeyDictionary()
"""For each ScriptModule what its code has on a device: an example."""


def refuse_constants(plan: ModulePlan, slots: Sequence[torch.device]) -> None:
    """Checks that no ScriptModule has constants on a device that some of the slots are not on.

    Raises:
        RuntimeError: one has; the message names it and says what to do.
    """
    inside: set[int] = set()  # their code is part of another's
    for entry in plan.entries:
        if not entry.is_script or id(entry.module) in inside:
            continue
        inside.update(map(id, entry.module.modules()))
        for device, what in _constants_of_script(entry.module).items():
            other = next((slot for slot in slots if slot != device), None)
            if other is not None and device != CPU:
                raise RuntimeError(
                    f"cannot replicate the ScriptModule {entry.name or 'at the root'!r} to {other}: {what} on {device} "
                    "is a constant of its code, because it was traced or frozen there. Wrap the module that is not "
                    "frozen, script it instead of tracing it, or make the tensor a buffer of the module before"
                )


def _constants_of_script(module: Any) -> dict[torch.device, str]:
    if module not in _constants_of_scripts:
        found: dict[torch.device, str] = {}
        graph = getattr(module, "inlined_graph", None)  # none if it has no forward
        for node in [] if graph is None else graph.findAllNodes("prim::Constant"):
            kind = node.output().type().kind()
            if kind == "TensorType" and node.hasAttribute("value"):
                found.setdefault(node.t("value").device, "a tensor")
            elif kind == "DeviceObjType" and node.hasAttribute("value"):
                found.setdefault(torch.device(node.s("value")), "the name of a device")
        _constants_of_scripts[module] = found
    return _constants_of_scripts[module]
