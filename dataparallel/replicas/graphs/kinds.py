"""What a captured graph depends on besides tensors: the contents of modules, the kinds of arguments, and settings.

``calls`` compares them: a graph is good as long as they are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.replicas.compiled.calls import CALL, CompiledCall, compiled_call
from dataparallel.replicas.plan import UNIT_MODULE
from dataparallel.replicas.references import ATOMIC


class _Same:
    """A value that equals itself alone, and stays as long as a key holds it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


_NOT_READ = {*_torch.REGISTRIES, *_torch.HOOK_TABLES, "_non_persistent_buffers_set", CALL, UNIT_MODULE}


def contents_of(root: nn.Module) -> Hashable:
    """What a forward may read of the modules besides tensors: a graph is good as long as this is the same."""
    return tuple(
        (
            name,
            type(module),
            _of_value(compiled_call(module)),
            *((key, _of_value(value)) for key, value in vars(module).items() if key not in _NOT_READ),
        )
        for name, module in root.named_modules()
    )


def _of_value(value: Any) -> Hashable:
    if isinstance(value, CompiledCall):
        value = value.functions
    is_atomic = type(value) in ATOMIC or (type(value) is tuple and all(type(item) in ATOMIC for item in value))
    return (type(value), value) if is_atomic else _Same(value)


def kind_of(leaves: Sequence[Any], spec: Any, device: torch.device) -> Hashable | str:
    """What a graph depends on besides the module: kinds of arguments, and settings. A string says why there is none."""
    kinds: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.device != device:
                return f"an argument is a {type(leaf).__name__} on {leaf.device} with layout {leaf.layout}"
            kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif type(leaf) in ATOMIC or isinstance(leaf, (torch.dtype, torch.device)):
            kinds.append((type(leaf), leaf))
        else:
            return f"an argument is a {type(leaf).__name__}"
    settings = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    return spec, settings, *kinds
