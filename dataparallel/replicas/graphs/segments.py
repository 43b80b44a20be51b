"""Which modules of a replica are captured.

It is the whole replica. When gradients are recorded, and the whole cannot be captured, its parts are captured, each by
itself. The whole is cut where parts begin (``pieces``), so either way the gradients of one part are summed while the
backward of the next one runs. A part is worth its launches, and the copies around it, only if it has several operators.

Of a fully sharded tree it is the units that have no units below, with gradients and without. A unit is gathered before
its module runs, and freed afterwards, by code that no graph has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dataparallel.comm.kinds import attributes_with_tensors
from dataparallel.replicas.compiled.calls import compiled_calls
from dataparallel.replicas.plan import UNIT_MODULE, ModulePlan, names_of

_LARGE = 0.5
"""A part with more than this share of the parameters is taken apart, so that not all gradients come at the end."""


@dataclass(frozen=True)
class Segments:
    """The modules of one replica that are captured, by their names below the root.

    Attributes:
        without_gradients, with_gradients: those that are captured if no graph of autograd is recorded, or if one is.
        modules: all of these, and the root.
    """

    without_gradients: dict[str, nn.Module]
    with_gradients: dict[str, nn.Module]
    modules: dict[str, nn.Module]

    @classmethod
    def of(cls, root: nn.Module) -> Segments:
        """The modules of a replica."""
        if UNIT_MODULE in vars(root):
            without = with_gradients = _lowest_units(root)
        else:
            without = {"": root}
            with_gradients = {**without, **_parts_of(root)}
        return cls(without, with_gradients, {"": root, **without, **with_gradients})


def why_none(plan: ModulePlan) -> str | None:
    """Why no module of the plan's replicas is captured; ``None`` if modules may be."""
    shared = [child for item in plan.shared if isinstance(item, nn.Module) for child in item.modules()]
    if any(isinstance(child, torch.jit.ScriptModule) for child in shared):
        return "one of its ignored modules is a ScriptModule"
    for i, tensor in enumerate(plan.tensors):
        # What a class with operators of its own keeps in attributes, such as shards, is what its tensors consist of.
        has_own_operators = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        if not has_own_operators and (attributes := attributes_with_tensors(tensor)):
            return f"the attribute {attributes[0]!r} of {names_of(plan)[i]} holds tensors"
    if plan.is_plain:
        return None
    for entry in plan.entries:
        name, kind = entry.name or "the module", entry.cls.__name__
        if entry.has_hooks:
            return f"{name} has hooks"
        if entry.has_own_rule:
            return f"{name} is {'an' if kind[:1] in 'AEILO' else 'a'} {kind}, whose class makes its replicas itself"
    return "attributes of a module refer to other modules or to tensors"


def _lowest_units(root: nn.Module) -> dict[str, nn.Module]:
    units = {name: module for name, module in root.named_modules() if UNIT_MODULE in vars(module)}
    return {
        name: module
        for name, module in units.items()
        if not any(UNIT_MODULE in vars(child) for child in module.modules() if child is not module)
    }


def _parts_of(root: nn.Module) -> dict[str, nn.Module]:
    """The parts of a replica.

    These are the children of the root that have children themselves. Lists and dicts of modules have no forward, so
    their entries take their place. So do the children of a ``Sequential`` with more than half of the parameters. What
    is compiled is not taken apart. If nothing is left, the root is the only part.
    """
    whole = _numel(root)
    found: dict[str, nn.Module] = {}

    def look_below(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            is_taken_apart = isinstance(child, (nn.ModuleList, nn.ModuleDict)) or _is_large(child, whole)
            if is_taken_apart and not compiled_calls(child):
                look_below(child, f"{prefix}{name}.")
            elif any(True for _ in child.children()) and child not in found.values():
                found[f"{prefix}{name}"] = child

    if not compiled_calls(root):
        look_below(root, "")
    return found or {"": root}


def _is_large(module: nn.Module, whole: int) -> bool:
    return isinstance(module, nn.Sequential) and len(module) > 1 and _numel(module) > _LARGE * whole


def _numel(module: nn.Module) -> int:
    # Not by a lookup, which would wait for parameters that are on their way.
    registries = [vars(child)["_parameters"] for child in module.modules()]
    return sum(p.numel() for registry in registries for p in dict.values(registry) if p is not None)
