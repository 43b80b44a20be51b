"""The library's forms without a wrapper: `replicate` and `fully_shard` change a module in place.

Afterwards the module runs on all slots. With `replicate` each slot has all parameters, with `fully_shard` each device
owns a part of them. This file has the public names and nothing else. Importing it touches no device. The names of
`fully_shard` are imported when they are first asked for: placements take torch most of a second to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dataparallel.composable.comm_hooks import GradBucket
from dataparallel.composable.on_slots import register_forward_method
from dataparallel.composable.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from dataparallel.composable.replicate import ReplicatedModule, replicate

if TYPE_CHECKING:
    from dataparallel.composable.fully_shard_form import fully_shard
    from dataparallel.composable.fully_sharded_module import FullyShardedModule

__all__ = [
    "CPUOffloadPolicy",
    "FullyShardedModule",
    "GradBucket",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicatedModule",
    "fully_shard",
    "register_forward_method",
    "replicate",
]


def __getattr__(name: str) -> Any:
    # Not a file `fully_shard`: importing that would set the package's attribute of this name to the file.
    files = {"fully_shard": "fully_shard_form", "FullyShardedModule": "fully_sharded_module"}
    if name not in files:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{files[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
