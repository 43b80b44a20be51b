"""Attributes of modules that refer to parameters which a form has replaced, and refer to the new ones from then on.

Examples are lists of weights (torch's RNNs have one), partials, and closures of hooks. Without this they would keep the
memory of the old parameters, and compute with their values. Variables outside of the modules keep the old ones. Only
``composable.fully_shard_form`` uses this.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from dataparallel._torch import HOOK_TABLES, REGISTRIES
from dataparallel.composable.replaced_parameters import replacement_of
from dataparallel.modules.references import ATOMIC, Rebinding, reached

__all__ = ["rebind"]


def rebind(modules: Iterable[nn.Module]) -> None:
    """Rebinds the attributes of these modules."""
    table: dict[int, Tensor] = {}
    places = []
    for module in modules:
        for key, value in vars(module).items():
            if key in REGISTRIES or type(value) in ATOMIC:
                continue
            replaced = [
                (id(item), new)
                for item in reached(value)
                if issubclass(type(item), Tensor) and (new := replacement_of(item)) is not None
            ]
            if replaced:
                table.update(replaced)
                places.append((vars(module), key))
    rebinding = Rebinding(table)
    for attributes, key in places:
        if key in HOOK_TABLES:  # the table stays: the handles of hooks refer to it
            attributes[key].update({number: rebinding.rebound(hook) for number, hook in attributes[key].items()})
        else:
            attributes[key] = rebinding.rebound(attributes[key])
