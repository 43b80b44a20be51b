"""`run` runs every ATen operator that has a sharded tensor among its arguments, below autograd.

It uses the function in `TABLE`, or the one that a rule has for this kind of operator (pointwise, on lists). If these
need several shards at once, it uses gathered tensors (``gathered``), unless that is refused. The other files fill the
table when ``sharded`` is imported. This file imports none of them, because the tensor's class imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from dataparallel import _torch
from dataparallel._torch import OpOverload
from dataparallel.sharded.order import ordered_in_backward, remember_streams, wait_for_host_reads

Operator: TypeAlias = Callable[..., Any]
"""A function that runs an operator. Its arguments are the ATen operator, then the arguments of the schema."""

TABLE: dict[OpOverload, Operator] = {}
"""The function for each operator. Functions that a rule has returned are kept here too."""

OF_VIEWS: dict[OpOverload, Operator] = {}
"""The functions for operators on views. Operators that it lacks are decomposed, or run on gathered tensors."""

RULES: list[Callable[[OpOverload], Operator | None]] = []
"""Each rule returns the function for operators of its kind, and ``None`` for others. They are tried in this order."""

ON_WHOLES: list[Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Exception], Any]] = []
"""Has the function that runs an operator on gathered tensors, or raises the error."""

LAUNCH_NOTHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operators that launch nothing on a stream."""

OVERWRITING = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"})
"""They are counted: a gradient that still waits to be added to the tensor may be void then."""


def register(*overloads: OpOverload) -> Callable[[Operator], Operator]:
    """Puts the decorated function into the table, for each of these operators."""

    def put(operator: Operator) -> Operator:
        TABLE.update(dict.fromkeys(overloads, operator))
        return operator

    return put


def by_table(func: OpOverload) -> Operator:
    """The function for an operator on sharded tensors."""
    operator = TABLE.get(func)
    if operator is None:
        operator = TABLE[func] = next(filter(None, (rule(func) for rule in RULES)), decomposed)
    return operator


def of_views(func: OpOverload) -> Operator:
    """The function for an operator that has a view among its arguments."""
    return OF_VIEWS.get(func, decomposed)


def run(operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator of which some arguments are sharded, by the function ``operator``."""
    if func not in LAUNCH_NOTHING:
        wait_for_host_reads()
    if _torch.is_in_backward():
        with ordered_in_backward(_devices_of_all([*args, *kwargs.values()])):
            result = _result(operator, func, args, kwargs)
    else:
        if torch.is_grad_enabled() and func not in LAUNCH_NOTHING:
            remember_streams(_devices_of_all([*args, *kwargs.values()]))
        result = _result(operator, func, args, kwargs)
    # `parameter.data` shares the parameter's shards and not its version, and below autograd torch moves no version of a
    # shard. Units look at the shards' versions: one is enough, because all shards of a tensor are written.
    if written_arguments(func):
        written = [*sharded_in(written_values(func, args, kwargs))]
        increment_version([tensor._shards[0] for tensor in written])
        for tensor in written if func.overloadpacket.__name__ in OVERWRITING else ():
            tensor._overwrites += 1
    return result


def _result(operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return operator(func, *args, **kwargs)
    except NeedsWhole as needs:
        error = needs.error
    return ON_WHOLES[0](func, args, kwargs, error)


@cache
def written_arguments(func: OpOverload) -> tuple[int | str, ...]:
    """Which arguments the operator writes to: their positions, or the names of keyword-only ones."""
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(_torch.schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_values(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that the operator writes to, also those in lists."""
    for place in written_arguments(func):
        value = kwargs.get(place) if isinstance(place, str) else args[place]
        yield from value if isinstance(value, (list, tuple)) else [value]


def sharded_in(values: Iterable[Any]) -> Iterator[Any]:
    """All sharded tensors, also those in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from sharded_in(value)
        elif isinstance(value, torch.Tensor) and hasattr(value, "_shards"):
            yield value


def _devices_of_all(values: Iterable[Any]) -> set[torch.device]:
    return {shard.device for tensor in sharded_in(values) for shard in tensor._shards}


def decomposed(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Decomposes a composite operator. torch does so itself, except in inference mode."""
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise NeedsWhole(refusal(func))
    return result


class NeedsWhole(Exception):
    """An operator needs more than each owner's shard, and has changed nothing. ``error``: raised if gathers are off."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def refusal(func: OpOverload, why: str = "") -> NotImplementedError:
    """The error for an operator that does not work. ``why`` completes "... does not work on sharded tensors".

    It is no ``TypeError``: torch's methods for ``+``, ``==`` and ``+=`` turn one into ``NotImplemented``. Then Python
    compares identities, or binds the name in ``plain += sharded`` to another tensor and writes nothing.
    """
    return NotImplementedError(
        f"{func} does not work on sharded tensors{why}; use full_tensor() to compute on the whole tensor"
    )
