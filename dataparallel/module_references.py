"""What hangs on an instance: references to a module tree that plain attributes hold, found and pointed elsewhere.

A module's parameters, buffers and children are in its registries; this room is about the rest of its ``__dict__``:
bound methods (``m.forward = MethodType(f, m)``), partials, functions with closures or defaults, caches, weak references
and proxies over modules of the tree, and those modules and tensors themselves, directly or within one level of list,
tuple, set, deque or dict (hooks, RNN weight lists, a list that holds the parent). A replica that kept them would
compute with the source's weights. Weak references to tensors stay: torch's RNNs tell by them that their weights have
changed. Used by ``module_plan`` and ``replicate`` only.

Types are asked with ``type``, never ``isinstance``: an attribute may pretend to be of another class, or be dead.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections import UserDict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["Rebinding", "atomic", "behind_proxy", "compiled_over", "reached"]

_ATOMIC = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType, types.ModuleType}
)
_CACHE = type(functools.lru_cache(lambda: None))
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def atomic(value: Any) -> bool:
    """Whether ``value`` is of a type that refers to nothing; the quick way past most attributes."""
    return type(value) in _ATOMIC


def reached(value: Any) -> list[Any]:
    """Every object that `Rebinding` would look at to point ``value`` elsewhere, ``value`` itself among them."""
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


def _elements(value: Any) -> Collection[Any]:
    """What a container holds, one level deep."""
    cls = type(value)
    if issubclass(cls, (list, tuple, set, frozenset, deque)):
        elements: Collection[Any] = value
    elif issubclass(cls, (dict, UserDict)):
        elements = [*value.keys(), *value.values()]
    else:
        return ()
    # Word lists and tables are long, and hold nothing else.
    return () if _ATOMIC.issuperset(map(type, elements)) else elements


def _behind(item: Any) -> list[Any]:
    """What a callable or weak reference leads to."""
    cls = type(item)
    if cls is types.MethodType:
        return [item.__self__, item.__func__]
    if cls is types.FunctionType:
        contents = [content for _, content in _filled(item)]
        return [*contents, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values(), *vars(item).values()]
    if issubclass(cls, functools.partial):
        return [item.func, *item.args, *item.keywords.values(), *vars(item).values()]
    if cls is _CACHE:
        return [item.__wrapped__]
    if issubclass(cls, weakref.ref):
        referent = item()
        return [referent] if issubclass(type(referent), (nn.Module, types.MethodType)) else []
    if cls in _PROXIES:
        return [behind_proxy(item)]
    return []


def behind_proxy(item: Any) -> Any:
    """The module behind a ``weakref.proxy``; ``item`` itself if it is none, or its module is gone."""
    try:
        if type(item) in _PROXIES and issubclass(item.__class__, nn.Module):
            return item.modules.__self__  # a method, looked up through the proxy, is bound to what is behind it
    except ReferenceError:
        pass
    return item


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


class Rebinding:
    """Points what the attributes of one replica hold at that replica.

    Containers, methods, partials, functions and weak references are built anew, never changed, and once: what two
    attributes share, the replica's share too. A function keeps its code and those cells of its closure that do not lead
    into the tree, so that counters outside are still counted.

    Args:
        table: from ids of the source's modules and tensors to those of the replica.

    Attributes:
        made: every object built here that holds others.
    """

    def __init__(self, table: Mapping[int, Any]) -> None:
        self._table = table
        self._done: dict[int, Any] = {}
        self.made: list[Any] = []

    def rebound(self, value: Any) -> Any:
        """``value``, which may be a container, with every reference into the tree replaced; itself if it has none."""
        cls = type(value)
        is_mapping = issubclass(cls, (dict, UserDict))
        if not is_mapping and not issubclass(cls, (list, tuple, set, frozenset, deque)):
            return self._one(value)
        if id(value) in self._done:
            return self._done[id(value)]
        if is_mapping:
            new = self._mapping(value)
        else:
            elements = [self._one(item) for item in value]
            same = all(new is old for new, old in zip(elements, value, strict=True))
            new = value if same else _sequence_like(value, elements)
        if new is not value:
            self.made += [new, vars(new), new.data] if issubclass(cls, UserDict) else [new]
        self._done[id(value)] = new
        return new

    def _mapping(self, value: Any) -> Any:
        items = [(self._one(key), self._one(item)) for key, item in value.items()]
        pairs = zip(items, value.items(), strict=True)
        if all(key is old_key and item is old for (key, item), (old_key, old) in pairs):
            return value
        new = copy.copy(value)
        if not all(key in new for key, _ in items):
            new.clear()
        new.update(items)
        return new

    def _one(self, item: Any) -> Any:
        """A value that is no container."""
        cls = type(item)
        if cls in _ATOMIC:
            return item
        if id(item) in self._table:
            return self._table[id(item)]
        if id(item) in self._done:
            return self._done[id(item)]
        if cls is types.FunctionType:
            return self._function(item)
        new = item
        if cls is types.MethodType:
            owner, function = self._one(item.__self__), self._one(item.__func__)
            if owner is not item.__self__ or function is not item.__func__:
                new = types.MethodType(function, owner)
                self.made.append(new)
        elif issubclass(cls, functools.partial):
            new = self._partial(item)
        elif cls is _CACHE:
            wrapped = self.rebound(item.__wrapped__)
            if wrapped is not item.__wrapped__:
                new = functools.lru_cache(**item.cache_parameters())(wrapped)
                self.made.append(new)
        elif issubclass(cls, weakref.ref):
            new = self._weak(item)
        elif cls in _PROXIES and id(behind_proxy(item)) in self._table:
            new = weakref.proxy(self._table[id(behind_proxy(item))])
        self._done[id(item)] = new
        return new

    def _weak(self, item: weakref.ref[Any]) -> weakref.ref[Any]:
        referent = item()
        if issubclass(type(referent), nn.Module) and id(referent) in self._table:
            return weakref.ref(self._table[id(referent)])
        if type(referent) is types.MethodType and id(referent.__self__) in self._table:
            return weakref.WeakMethod(types.MethodType(referent.__func__, self._table[id(referent.__self__)]))
        return item

    def _partial(self, item: functools.partial[Any]) -> functools.partial[Any]:
        if not self._leads_into_the_tree(item):
            return item
        args = [self.rebound(arg) for arg in item.args]
        keywords = {key: self.rebound(value) for key, value in item.keywords.items()}
        new = type(item)(self.rebound(item.func), *args, **keywords)
        vars(new).update({key: self.rebound(value) for key, value in vars(item).items()})
        # The empty tuple is everybody's.
        self.made += [new, vars(new), *(part for part in (new.args, new.keywords) if part)]
        return new

    def _function(self, item: types.FunctionType) -> types.FunctionType:
        if not self._leads_into_the_tree(item):
            self._done[id(item)] = item
            return item
        cells = {id(cell): types.CellType() for cell, content in _filled(item) if self._leads_into_the_tree(content)}
        closure = tuple(cells.get(id(cell), cell) for cell in item.__closure__ or ())
        new = types.FunctionType(item.__code__, item.__globals__, item.__name__, None, closure)
        # From here on a cell that leads back to the function finds the new one.
        self._done[id(item)] = new
        new.__defaults__ = item.__defaults__ and self.rebound(item.__defaults__)
        new.__kwdefaults__ = item.__kwdefaults__ and self.rebound(item.__kwdefaults__)
        new.__annotations__ = item.__annotations__
        new.__qualname__ = item.__qualname__
        vars(new).update({key: self.rebound(value) for key, value in vars(item).items()})
        for cell, content in _filled(item):
            if id(cell) in cells:
                cells[id(cell)].cell_contents = self.rebound(content)
        self.made += [new, vars(new), *([closure] if closure else []), *cells.values()]
        return new

    def _leads_into_the_tree(self, value: Any) -> bool:
        return any(id(item) in self._table for item in reached(value))


def _sequence_like(value: Any, elements: list[Any]) -> Any:
    cls = type(value)
    if issubclass(cls, (list, deque)):
        new = copy.copy(value)
        new.clear()
        new.extend(elements)
        return new
    return cls._make(elements) if hasattr(cls, "_make") else cls(elements)
