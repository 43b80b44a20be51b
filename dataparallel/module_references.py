"""What hangs on an instance: references to a module tree that plain attributes hold, found and pointed elsewhere.

A module's parameters, buffers and children are in its registries; this room is about the rest of its ``__dict__``:
bound methods (``m.forward = MethodType(f, m)``), partials, closures and weak references over modules of the tree, and
those modules and tensors themselves, directly or within one level of list, tuple, set or dict (hooks, RNN weight
lists, a list that holds the parent). A replica that kept them would compute with the source's weights. Weak
references to tensors stay: torch's RNNs tell by them that their weights have changed. Used by ``module_plan`` and
``replicate`` only.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

__all__ = ["atomic", "compiled_over", "rebound", "refers"]

_ATOMIC = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType, types.ModuleType}
)


def atomic(value: Any) -> bool:
    """Whether ``value`` is of a type that refers to nothing; the quick way past most attributes."""
    return type(value) in _ATOMIC


def refers(value: Any, known: Collection[int]) -> bool:
    """Whether ``value`` leads to an object whose id is in ``known``, by the ways that `rebound` follows."""
    return any(id(found) in known for found in _reached(value))


def _reached(value: Any) -> list[Any]:
    """Every object that `rebound` would look at, ``value`` and container elements included."""
    found: list[Any] = []
    waiting = [value, *_elements(value)]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if atomic(item) or id(item) in seen:
            continue
        seen.add(id(item))
        found.append(item)
        waiting.extend(_behind(item))
    return found


def _elements(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(value.values()) if isinstance(value, dict) else []


def _behind(item: Any) -> list[Any]:
    """What a callable or weak reference leads to."""
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
    if isinstance(item, weakref.ref):
        referent = item()
        return [referent] if isinstance(referent, (nn.Module, types.MethodType)) else []
    return []


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (a cell that is still empty raises)
    except ValueError:
        return False
    return True


def compiled_over(value: Any, known: Collection[int]) -> bool:
    """Whether ``value`` is, or one of its elements is, a function that ``torch.compile`` made over the tree."""
    for item in (value, *_elements(value)):
        original = vars(item).get("_torchdynamo_orig_callable") if isinstance(item, types.FunctionType) else None
        if original is not None and refers(original, known):
            return True
    return False


def rebound(value: Any, table: Mapping[int, Any]) -> Any:
    """``value`` with every reference to a key of ``table`` (an id) replaced; itself where there is none.

    Containers, methods, partials, functions and weak references are built anew, never changed. A function with a
    replaced closure keeps its code and defaults, and has its own cells from then on.
    """
    one = _rebound_one(value, table, {})
    if one is not value:
        return one
    if isinstance(value, dict):
        changed = {key: _rebound_one(item, table, {}) for key, item in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        table_like = copy.copy(value)
        table_like.update(changed)
        return table_like
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_rebound_one(item, table, {}) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            new = copy.copy(value)
            new[:] = items
            return new
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _rebound_one(item: Any, table: Mapping[int, Any], memo: dict[int, Any]) -> Any:
    if atomic(item):
        return item
    if id(item) in table:
        return table[id(item)]
    if id(item) in memo:
        return memo[id(item)]
    memo[id(item)] = item  # a closure that leads back to itself keeps that cell
    if isinstance(item, types.MethodType):
        owner, function = _rebound_one(item.__self__, table, memo), _rebound_one(item.__func__, table, memo)
        if owner is not item.__self__ or function is not item.__func__:
            memo[id(item)] = types.MethodType(function, owner)
    elif isinstance(item, functools.partial):
        memo[id(item)] = _rebound_partial(item, table, memo)
    elif isinstance(item, types.FunctionType):
        memo[id(item)] = _rebound_function(item, table, memo)
    elif isinstance(item, weakref.WeakMethod):
        method = item()
        new = _rebound_one(method, table, memo)
        memo[id(item)] = item if new is method else weakref.WeakMethod(new)
    elif type(item) is weakref.ref:
        referent = item()
        if isinstance(referent, nn.Module) and id(referent) in table:
            memo[id(item)] = weakref.ref(table[id(referent)])
    return memo[id(item)]


def _rebound_partial(
    item: functools.partial[Any], table: Mapping[int, Any], memo: dict[int, Any]
) -> functools.partial[Any]:
    function = _rebound_one(item.func, table, memo)
    args = [_rebound_one(arg, table, memo) for arg in item.args]
    keywords = {key: _rebound_one(value, table, memo) for key, value in item.keywords.items()}
    same = (
        function is item.func
        and all(new is old for new, old in zip(args, item.args, strict=True))
        and all(keywords[key] is item.keywords[key] for key in keywords)
    )
    if same:
        return item
    new = type(item)(function, *args, **keywords)
    new.__dict__.update(item.__dict__)
    return new


def _rebound_function(item: types.FunctionType, table: Mapping[int, Any], memo: dict[int, Any]) -> types.FunctionType:
    cells = item.__closure__ or ()
    contents = [cell.cell_contents if _filled(cell) else None for cell in cells]
    changed = [_rebound_one(content, table, memo) for content in contents]
    if all(new is old for new, old in zip(changed, contents, strict=True)):
        return item
    closure = tuple(
        cell if new is old else types.CellType(new) for cell, new, old in zip(cells, changed, contents, strict=True)
    )
    new = types.FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, closure)
    new.__kwdefaults__ = item.__kwdefaults__
    new.__qualname__ = item.__qualname__
    new.__dict__.update(item.__dict__)
    return new
