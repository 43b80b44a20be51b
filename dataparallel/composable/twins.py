"""The twin of a managed module: the object that replicas are made from in place of the module.

It has all attributes of the module, so the same children and tensors. Two things may differ: its class, and its hooks.
Hooks on the module run around the call, on the whole batch, and not in each replica. ``composable.replicate_state`` and
``composable.fully_shard_state`` use it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from dataparallel._torch import HOOK_TABLES
from dataparallel.modules.build import bare_module
from dataparallel.modules.plan import TWIN_INFO, TwinInfo, instance_slots

__all__ = ["Twin"]


class Twin:
    """The twin of one module. It is the same object at each call: so an unchanged tree is recognised.

    Args:
        cls: its class, that of the replicas.
        info: what plans are told about it.

    Attributes:
        module: the twin itself. It has no attributes until `update` is called.
    """

    def __init__(self, cls: type[nn.Module], info: TwinInfo) -> None:
        self.module = bare_module(cls)
        self._info = info
        self._no_hooks: dict[str, Any] = {name: OrderedDict() for name in HOOK_TABLES}

    def update(self, source: nn.Module, method: str) -> nn.Module:
        """The twin with the current attributes of ``source``, for a call of ``method``.

        For ``forward`` it has no hooks: the module's hooks run around the call on the whole batch. Another method may
        call the replica itself, and then they run in the replica.
        """
        hooks = self._no_hooks if method == "forward" else {}
        # Past `Module.__setattr__`, which would look for parameters in it.
        object.__setattr__(self.module, "__dict__", {**vars(source), **hooks, TWIN_INFO: self._info})
        for name in instance_slots(type(self.module)):
            if hasattr(source, name):
                setattr(self.module, name, getattr(source, name))
        return self.module
