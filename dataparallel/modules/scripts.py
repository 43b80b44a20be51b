"""ScriptModules whose code is right on one device only: refused where slots are on others.

``torch.jit.freeze`` makes constants of parameters, and ``torch.jit.trace`` of devices and of tensors that Python code
makes. TorchScript owns the code, so a replica on another device cannot have constants of its own. ``kept.replicas`` and
``replicate`` ask before they make replicas. Nothing here knows how replicas are made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.devices import CPU
from dataparallel.modules.plan import ModulePlan

__all__ = ["refuse_constants"]

_known: weakref.WeakKeyDictionary[Any, dict[torch.device, str]] = weakref.WeakKeyDictionary()
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
        for device, what in _constants_of(entry.module).items():
            other = next((slot for slot in slots if slot != device), None)
            if other is not None and device != CPU:
                raise RuntimeError(
                    f"cannot replicate the ScriptModule {entry.name or 'at the root'!r} to {other}: {what} on {device} "
                    "is a constant of its code, because it was traced or frozen there. Wrap the module that is not "
                    "frozen, script it instead of tracing it, or make the tensor a buffer of the module before"
                )


def _constants_of(module: Any) -> dict[torch.device, str]:
    if module not in _known:
        found: dict[torch.device, str] = {}
        graph = getattr(module, "inlined_graph", None)  # none if it has no forward
        for node in [] if graph is None else graph.findAllNodes("prim::Constant"):
            kind = node.output().type().kind()
            if kind == "TensorType" and node.hasAttribute("value"):
                found.setdefault(node.t("value").device, "a tensor")
            elif kind == "DeviceObjType" and node.hasAttribute("value"):
                found.setdefault(torch.device(node.s("value")), "the name of a device")
        _known[module] = found
    return _known[module]
