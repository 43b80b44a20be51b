"""The floating-point operations of a launch, by the formulas of ``torch.utils.flop_counter``.

The extension keeps the arguments and results of the operators that have a formula, with a tuple of sizes for each
tensor. This file calls the formulas with them; ``recording`` calls this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils import flop_counter

__all__ = ["Call", "formulas", "operations"]

Call: TypeAlias = "tuple[list[Any], dict[str, Any], list[Any]]"
"""Positional arguments, keyword arguments and results, with a tuple of sizes for each tensor."""

# The attention that torch chooses on the CPU, and so on simulated devices. Its tensors are those of CUDA's.
SAME_FORMULA = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "aten::_scaled_dot_product_flash_attention_backward",
}


def formulas() -> dict[str, Callable[..., int]]:
    """Returns the formula of each operator that has one, by names such as ``aten::mm``. Users may register more."""
    kind = type(torch.ops.aten.mm)  # the registry also has operators that are no functions of a library
    registered = flop_counter.flop_registry.items()
    known = {str(key).replace(".", "::", 1): formula for key, formula in registered if isinstance(key, kind)}
    return known | {op: known[other] for op, other in SAME_FORMULA.items() if other in known}


def operations(op: str, formula: Callable[..., int], call: Call) -> int:
    """Returns the floating-point operations of one call.

    Raises:
        RuntimeError: if the formula fails, with the operator and what the formula was called with.
    """
    positional, keywords, results = (_with_tensors(values) for values in call)
    try:
        return int(formula(*positional, **keywords, out_val=results[0] if len(results) == 1 else tuple(results)))
    except Exception as error:
        raise RuntimeError(
            f"the formula for the FLOPs of {op} (torch.utils.flop_counter) failed for the arguments {call[0]} and "
            f"{call[1]}, in which a tuple is the shape of a tensor: {error}"
        ) from error


def _with_tensors(value: Any) -> Any:
    """Replaces each tuple of sizes by a tensor: a formula may ask for more than its shape."""
    if isinstance(value, tuple):
        return _tensor(value)
    if isinstance(value, list):
        return [_with_tensors(element) for element in value]
    if isinstance(value, dict):
        return {name: _with_tensors(element) for name, element in value.items()}
    return value


@functools.lru_cache(maxsize=4096)
def _tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")
