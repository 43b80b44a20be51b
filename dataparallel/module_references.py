"""What hangs on an instance: references to a module tree that plain attributes hold, found and pointed elsewhere.

A module's parameters, buffers and children are in its registries; this room is about the rest of its ``__dict__``:
bound methods (``m.forward = MethodType(f, m)``), partials, functions with closures or defaults, caches and weak
references over modules of the tree, and those modules and tensors themselves, directly or within one level of list,
tuple, set or dict (hooks, RNN weight lists, a list that holds the parent). A replica that kept them would compute with
the source's weights. Weak references to tensors stay: torch's RNNs tell by them that their weights have changed. Used
by ``module_plan`` and ``replicate`` only.

Types are asked with ``type``, never ``isinstance``: an attribute may pretend to be of another class, or be dead.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["atomic", "compiled_over", "is_module_proxy", "reached", "rebound"]

_ATOMIC = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType, types.ModuleType}
)
_CACHE = type(functools.lru_cache(lambda: None))
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def atomic(value: Any) -> bool:
    """Whether ``value`` is of a type that refers to nothing; the quick way past most attributes."""
    return type(value) in _ATOMIC


def reached(value: Any) -> list[Any]:
    """Every object that `rebound` would look at to point ``value`` elsewhere, ``value`` itself among them."""
    found: list[Any] = []
    waiting = [value, *_elements(value)]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if type(item) in _ATOMIC or id(item) in seen:
            continue
        seen.add(id(item))
        found.append(item)
        for behind in _behind(item):
            waiting += [behind, *_elements(behind)]
    return found


def _elements(value: Any) -> list[Any]:
    """What a container holds, one level deep."""
    cls = type(value)
    if issubclass(cls, (list, tuple, set, frozenset)):
        return list(value)
    return list(value.values()) if issubclass(cls, dict) else []


def _behind(item: Any) -> list[Any]:
    """What a callable or weak reference leads to."""
    cls = type(item)
    if cls is types.MethodType:
        return [item.__self__, item.__func__]
    if cls is types.FunctionType:
        return [content for _, content in _filled(item)] + [
            *(item.__defaults__ or ()),
            *(item.__kwdefaults__ or {}).values(),
        ]
    if issubclass(cls, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if cls is _CACHE:
        return [item.__wrapped__]
    if issubclass(cls, weakref.ref):
        referent = item()
        return [referent] if issubclass(type(referent), (nn.Module, types.MethodType)) else []
    return []


def _filled(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """The cells of a closure with their contents; one that is still empty has none."""
    for cell in function.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:
            continue


def compiled_over(items: Collection[Any], known: Collection[int]) -> bool:
    """Whether among ``items`` is something that ``torch.compile`` made over an object whose id is in ``known``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nobody has compiled anything
        return False
    for item in items:
        if issubclass(type(item), dynamo.OptimizedModule):
            originals: list[Any] = [vars(item).get("_modules", {}).get("_orig_mod")]
        elif type(item) is types.FunctionType and not vars(item).get("_torchdynamo_disable", False):
            originals = reached(vars(item).get("_torchdynamo_orig_callable"))
        else:
            continue
        if any(id(original) in known for original in originals):
            return True
    return False


def is_module_proxy(item: Any) -> bool:
    """Whether ``item`` is a ``weakref.proxy`` of a module: it cannot be told which, so it cannot be followed."""
    if type(item) not in _PROXIES:
        return False
    try:
        return issubclass(item.__class__, nn.Module)
    except ReferenceError:
        return False


def rebound(value: Any, table: Mapping[int, Any], made: list[Any]) -> Any:
    """``value`` with every reference to a key of ``table`` (an id) replaced; itself where there is none.

    Containers, methods, partials, functions and weak references are built anew, never changed. A function keeps its
    code and those cells of its closure that do not lead into the tree, so that counters outside are still counted.

    Args:
        value: an attribute.
        table: from ids of the source's modules and tensors to those of the replica.
        made: every object built here that holds others is appended to it.
    """
    return _Rebinding(table, made).any(value)


class _Rebinding:
    """One pass of `rebound`; ``done`` has what became of each object so far, by id."""

    def __init__(self, table: Mapping[int, Any], made: list[Any]) -> None:
        self.table, self.made = table, made
        self.done: dict[int, Any] = {}

    def any(self, value: Any) -> Any:
        """A value that may be a container."""
        one = self.one(value)
        if one is not value:
            return one
        cls = type(value)
        if issubclass(cls, dict):
            items = {key: self.one(item) for key, item in value.items()}
            if all(items[key] is value[key] for key in items):
                return value
            new = copy.copy(value)
            new.update(items)
        elif issubclass(cls, (list, tuple, set, frozenset)):
            elements = [self.one(item) for item in value]
            if all(new is old for new, old in zip(elements, value, strict=True)):
                return value
            if issubclass(cls, list):
                new = copy.copy(value)
                new[:] = elements
            else:
                new = cls._make(elements) if hasattr(cls, "_make") else cls(elements)
        else:
            return value
        self.made.append(new)
        return new

    def one(self, item: Any) -> Any:
        """A value that is no container."""
        cls = type(item)
        if cls in _ATOMIC:
            return item
        if id(item) in self.table:
            return self.table[id(item)]
        if id(item) in self.done:
            return self.done[id(item)]
        new = item
        if cls is types.FunctionType:
            return self.function(item)
        if cls is types.MethodType:
            owner, function = self.one(item.__self__), self.one(item.__func__)
            if owner is not item.__self__ or function is not item.__func__:
                new = types.MethodType(function, owner)
        elif issubclass(cls, functools.partial):
            new = self.partial(item)
        elif cls is _CACHE:
            wrapped = self.any(item.__wrapped__)
            if wrapped is not item.__wrapped__:
                new = functools.lru_cache(**item.cache_parameters())(wrapped)
        elif issubclass(cls, weakref.ref):
            return self.weak(item)
        self.done[id(item)] = new
        if new is not item:
            self.made.append(new)
        return new

    def weak(self, item: weakref.ref[Any]) -> weakref.ref[Any]:
        referent = item()
        if issubclass(type(referent), nn.Module) and id(referent) in self.table:
            return weakref.ref(self.table[id(referent)])
        if type(referent) is types.MethodType and id(referent.__self__) in self.table:
            return weakref.WeakMethod(types.MethodType(referent.__func__, self.table[id(referent.__self__)]))
        return item

    def partial(self, item: functools.partial[Any]) -> functools.partial[Any]:
        if not self.leads_into_the_tree(item):
            return item
        args = [self.any(arg) for arg in item.args]
        keywords = {key: self.any(value) for key, value in item.keywords.items()}
        new = type(item)(self.any(item.func), *args, **keywords)
        new.__dict__.update(item.__dict__)
        # The empty tuple is everybody's.
        self.made += [part for part in (new.args, new.keywords) if part]
        return new

    def function(self, item: types.FunctionType) -> types.FunctionType:
        if not self.leads_into_the_tree(item):
            self.done[id(item)] = item
            return item
        renewed = {id(cell): types.CellType() for cell, content in _filled(item) if self.leads_into_the_tree(content)}
        closure = tuple(renewed.get(id(cell), cell) for cell in item.__closure__ or ())
        new = types.FunctionType(item.__code__, item.__globals__, item.__name__, None, closure)
        # From here on a cell that leads back to the function finds the new one.
        self.done[id(item)] = new
        self.made += [new, closure, *renewed.values()]
        new.__defaults__ = item.__defaults__ and self.any(item.__defaults__)
        new.__kwdefaults__ = item.__kwdefaults__ and self.any(item.__kwdefaults__)
        new.__annotations__ = item.__annotations__
        new.__qualname__ = item.__qualname__
        new.__dict__.update(item.__dict__)
        for cell, content in _filled(item):
            if id(cell) in renewed:
                renewed[id(cell)].cell_contents = self.any(content)
        return new

    def leads_into_the_tree(self, value: Any) -> bool:
        return any(id(item) in self.table for item in reached(value))
