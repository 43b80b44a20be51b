"""What each ATen operator does on sharded tensors.

`run` is where every operator arrives that has a sharded tensor among its arguments, below autograd. It looks the
operator up in `TABLE`, then asks the rules, which know operators by their kind (all pointwise ones, all on lists). An
operator that neither knows, and that torch does not make of others, needs whole tensors, and so does one that is known
where its arguments do not lie alike: `gathered` runs it on whole tensors, or refuses it. The files of this room fill
the table when ``sharded`` is imported; this one imports none of them, because the tensor's class imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded import host_reads, in_backward

__all__ = [
    "RULES",
    "TABLE",
    "NeedsWhole",
    "Operator",
    "refusal",
    "register",
    "register_on_wholes",
    "register_rule",
    "run",
]

Operator: TypeAlias = "Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]"
"""Takes the operator, its arguments and its keyword arguments."""

OnWholes: TypeAlias = "Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Exception], Any]"
"""Also takes the error to be raised if tensors may not be gathered."""

TABLE: dict[OpOverload, Operator] = {}
"""What single operators do. What a rule says of an operator is kept here too."""

RULES: list[Callable[[OpOverload], Operator | None]] = []
"""Functions that say what an operator of a kind does, or ``None`` if it is not of that kind."""

_on_wholes: list[OnWholes] = []

LAUNCH_NOTHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operators whose current streams do not matter."""


def register(*overloads: OpOverload) -> Callable[[Operator], Operator]:
    """Puts the decorated function into the table, for each of these operators."""

    def put(operator: Operator) -> Operator:
        for overload in overloads:
            TABLE[overload] = operator
        return operator

    return put


def register_rule(
    rule: Callable[[OpOverload], Operator | None],
) -> Callable[[OpOverload], Operator | None]:
    """Adds a rule. Rules are asked in the order in which they were added."""
    RULES.append(rule)
    return rule


def register_on_wholes(on_wholes: OnWholes) -> OnWholes:
    """Has this function run operators that need whole tensors."""
    _on_wholes[:] = [on_wholes]
    return on_wholes


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result on arguments some of which are sharded.

    Raises:
        TypeError: the operator does not work on sharded tensors, or not on these.
        ValueError: the sharded tensors have different owners or placements.
    """
    operator = TABLE.get(func)
    if operator is None:
        operator = TABLE[func] = _of_kind(func)
    if func not in LAUNCH_NOTHING:
        host_reads.wait()
    if _torch.is_in_backward():
        with in_backward.ordered(_places([*args, *kwargs.values()])):
            return _result(operator, func, args, kwargs)
    if torch.is_grad_enabled() and func not in LAUNCH_NOTHING:
        in_backward.remember(_places([*args, *kwargs.values()]))
    return _result(operator, func, args, kwargs)


def _result(operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return operator(func, args, kwargs)
    except NeedsWhole as needs:
        error = needs.error
    return _on_wholes[0](func, args, kwargs, error)


def _places(values: Iterable[Any]) -> set[torch.device]:
    """Where the parts of the sharded tensors are, also of those in lists."""
    found: set[torch.device] = set()
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= _places(value)
        elif isinstance(value, torch.Tensor):
            found.update(shard.device for shard in getattr(value, "_shards", ()))
    return found


def _of_kind(func: OpOverload) -> Operator:
    for rule in RULES:
        operator = rule(func)
        if operator is not None:
            return operator
    return _made_of_others


def _made_of_others(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under inference mode operators that torch makes of others arrive whole."""
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NeedsWhole(refusal(func))
    return result


class NeedsWhole(Exception):
    """An operator needs more than each owner has. It has changed nothing.

    Attributes:
        error: what is raised if tensors may not be gathered.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def refusal(func: OpOverload, why: str = "") -> TypeError:
    """The error for an operator that does not work. ``why`` completes "... does not work on sharded tensors"."""
    return TypeError(f"{func} does not work on sharded tensors{why}; use full_tensor() to compute on the whole tensor")
