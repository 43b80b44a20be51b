"""Helpers for tests, of the library and of its users: small models, comparisons, simulated accelerators.

`models` has small models, one for each feature that replicas must reproduce, and models for sharding; `cases` has the
parts of the first. `parity` compares a module on several slots with the same module on one device, for the library's
models and for your own; `steps` has its comparisons. `simulated` makes accelerators on a machine
without any, and ``dataparallel.testing.pytest`` is a plugin with a fixture for them.
`isolated_slots` makes slots on one device behave as separate devices. Nothing in the library
imports this package, and importing it touches no device. Models are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dataparallel.testing.isolation import isolated_slots
from dataparallel.testing.simulated import SimulationUnavailable, ToolsMissing, simulate

if TYPE_CHECKING:
    from dataparallel.testing.models import MLP, ModelArgs, RMSNorm, StackedMLP, Transformer

__all__ = [
    "MLP",
    "ModelArgs",
    "RMSNorm",
    "SimulationUnavailable",
    "StackedMLP",
    "ToolsMissing",
    "Transformer",
    "isolated_slots",
    "simulate",
]

# Where each name is that is imported when it is first asked for.
_LATER = {
    **dict.fromkeys(("MLP", "ModelArgs", "RMSNorm", "StackedMLP", "Transformer"), "dataparallel.testing.models"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
