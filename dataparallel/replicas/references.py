"""Finds references to a module tree in plain attributes of its modules, and rebinds them to a replica.

References are bound methods, partials, closures, caches, weak references and proxies that lead to the tree, objects
that are called in place of a method (``m.forward = Wrapper(m.forward)``), and modules and tensors themselves, directly
or within one level of a container. A replica that kept them would compute with the source's weights. Weak references to
tensors stay: torch's RNNs see by them that their weights have changed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from dataparallel import _torch
from dataparallel._torch import HOOK_TABLES

# Types are read with `type`, never `isinstance`: an attribute may pretend to be of another class, or be dead.
ATOMIC = frozenset({type(None), bool, int, float, complex, str, bytes, type, types.ModuleType})
"""Types of values that refer to nothing."""

_NOT_ENTERED = ATOMIC | {list, tuple, dict, set, frozenset}  # as elements: only one level is looked at
_BUILT_IN_METHODS = (types.BuiltinFunctionType, types.MethodWrapperType)
_CACHE = type(functools.lru_cache(lambda: None))
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict, UserDict)


def method_owner(value: Any) -> Any:
    """The object whose attributes a callable uses, which is itself or what it is bound to; ``None`` for functions.

    Modules and classes are no such objects: a module leads to the tree only if it is a part of it.
    """
    owner = value.__self__ if type(value) is types.MethodType else value
    cls = type(owner)
    has_code = owner is not value or type(inspect.getattr_static(cls, "__call__", None)) is types.FunctionType
    return owner if has_code and not issubclass(cls, (nn.Module, type)) and hasattr(owner, "__dict__") else None


def reached_by_method(owner: Any) -> list[Any]:
    """`reached` for the attributes of a `method_owner`, and of such objects that it calls itself."""
    owners, found = {id(owner): owner}, []
    waiting = [owner]
    for each in waiting:
        found += reached(vars(each))
        inner = {id(own): own for own in map(method_owner, vars(each).values()) if own is not None}
        waiting += [own for key, own in inner.items() if key not in owners]
        owners |= inner
    return found


def reached(value: Any) -> list[Any]:
    """Every object that `Rebinding` looks at to rebind ``value``, including ``value`` itself."""
    found: list[Any] = []
    waiting = [value, *_elements(value)]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if type(item) in ATOMIC or id(item) in seen:
            continue
        seen.add(id(item))
        found.append(item)
        for behind in _behind(item):
            waiting += [behind, *_elements(behind)]
    return found


def _elements(value: Any) -> list[Any]:
    """The elements of a container that may refer to something. The others are left out: word lists are long."""
    cls = type(value)
    if issubclass(cls, (list, tuple, set, frozenset, deque)):
        return [item for item in value if type(item) not in _NOT_ENTERED]
    if issubclass(cls, (dict, UserDict)):
        return [item for pair in _items(value) for item in pair if type(item) not in _NOT_ENTERED]
    return []


def _items(value: Any) -> Collection[tuple[Any, Any]]:
    """The items of a dict, past methods that its class overrides."""
    table = vars(value).get("data") if issubclass(type(value), UserDict) else value
    return dict.items(table) if isinstance(table, dict) else ()


def _behind(item: Any) -> list[Any]:
    """The objects that a callable or weak reference leads to."""
    cls = type(item)
    if cls is types.MethodType:
        return [item.__self__, item.__func__]
    if cls in _BUILT_IN_METHODS:
        return [item.__self__]
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
            return item.modules.__self__  # a method that is looked up through a proxy is bound to the module
    except ReferenceError:
        pass
    return item


def _filled(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """The cells of a closure with their contents, without cells that are still empty."""
    for cell in function.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:
            continue


def compiled_over(items: Collection[Any], known: Collection[int]) -> bool:
    """True if ``torch.compile`` made one of ``items`` from an object whose id is in ``known``."""
    if not _torch.is_compiler_loaded():  # nothing is compiled
        return False
    return any(id(original) in known for item in items for original in reached(_torch.compiled_original(item)))


class Rebinding:
    """Replaces references to the source in the attributes of one replica by references to the replica.

    Containers, methods, partials, functions and weak references are never changed: new ones are built, each once, so
    that an object that two attributes of the source share is shared in the replica too. A function keeps its code and
    those cells of its closure that do not lead into the tree, so that a counter outside of the tree still counts.

    ``table``: from ids of the source's modules and tensors to those of the replica.
    """

    def __init__(self, table: Mapping[int, Any]) -> None:
        self._table = table
        self._done: dict[int, tuple[Any, Any]] = {}

    def rebound(self, value: Any) -> Any:
        """``value``, which may be a container, with every reference into the tree replaced; itself if it has none."""
        cls = type(value)
        if id(value) in self._table or not issubclass(cls, _CONTAINERS):
            return self._one(value)
        if id(value) in self._done:
            return self._done[id(value)][1]
        if not self._leads_into_the_tree(value):
            return value
        if not issubclass(cls, (list, deque, dict, UserDict)):
            elements = [self._one(item) for item in value]
            return self._made(value, cls._make(elements) if hasattr(cls, "_make") else cls(elements))
        # Noted before it is filled: its elements may lead back to it.
        new = self._made(value, copy.copy(value))
        if issubclass(cls, (list, deque)):
            new.clear()
            new.extend(self._one(item) for item in value)
            return new
        items = [(self._one(key), self._one(item)) for key, item in _items(value)]
        table = new.data if issubclass(cls, UserDict) else new
        dict.clear(table)
        dict.update(table, items)
        return new

    def rebound_method(self, value: Any) -> Any:
        """A callable that has a `method_owner`, with a copy of this object, whose attributes lead into the replica."""
        owner = method_owner(value)
        if id(owner) not in self._done:
            attributes = vars(self._made(owner, copy.copy(owner)))
            inner = {key: item for key, item in vars(owner).items() if method_owner(item) is not None}
            attributes.update({key: self.rebound_method(item) for key, item in inner.items()})
            attributes.update({key: self.rebound(item) for key, item in vars(owner).items() if key not in inner})
        new = self._done[id(owner)][1]
        return new if owner is value else types.MethodType(self._one(value.__func__), new)

    def _made(self, item: Any, new: Any) -> Any:
        # With the item, so that its id stays taken.
        self._done[id(item)] = item, new
        return new

    def _one(self, item: Any) -> Any:
        """Like `rebound`, for an element: a container inside a container stays as it is."""
        cls = type(item)
        if cls in ATOMIC:
            return item
        if id(item) in self._table:
            return self._table[id(item)]
        if id(item) in self._done:
            return self._done[id(item)][1]
        if issubclass(cls, _CONTAINERS) or not self._leads_into_the_tree(item):
            return item
        if cls is types.MethodType:
            return self._made(item, types.MethodType(self._one(item.__func__), self._one(item.__self__)))
        if cls in _BUILT_IN_METHODS:
            owner = self._one(item.__self__)
            return item if owner is item.__self__ else self._made(item, getattr(owner, item.__name__))
        if cls is types.FunctionType:
            return self._function(item)
        if issubclass(cls, functools.partial):
            return self._partial(item)
        if cls is _CACHE:
            return self._made(item, functools.lru_cache(**item.cache_parameters())(self.rebound(item.__wrapped__)))
        if issubclass(cls, weakref.ref):
            return self._weak(item)
        if cls in _PROXIES:
            return weakref.proxy(self._table[id(behind_proxy(item))])
        return item

    def _weak(self, item: weakref.ref[Any]) -> weakref.ref[Any]:
        referent = item()
        if issubclass(type(referent), nn.Module) and id(referent) in self._table:
            return weakref.ref(self._table[id(referent)])
        if type(referent) is types.MethodType and id(referent.__self__) in self._table:
            return weakref.WeakMethod(types.MethodType(referent.__func__, self._table[id(referent.__self__)]))
        return item

    def _partial(self, item: functools.partial[Any]) -> functools.partial[Any]:
        args = [self.rebound(arg) for arg in item.args]
        keywords = {key: self.rebound(value) for key, value in item.keywords.items()}
        new: functools.partial[Any] = self._made(item, type(item)(self.rebound(item.func), *args, **keywords))
        vars(new).update({key: self.rebound(value) for key, value in vars(item).items()})
        return new

    def _function(self, item: types.FunctionType) -> types.FunctionType:
        cells = {id(cell): types.CellType() for cell, content in _filled(item) if self._leads_into_the_tree(content)}
        closure = tuple(cells.get(id(cell), cell) for cell in item.__closure__ or ())
        # Noted before it is complete: a cell may lead back to it.
        new: types.FunctionType = self._made(
            item, types.FunctionType(item.__code__, item.__globals__, item.__name__, None, closure)
        )
        functools.update_wrapper(new, item)
        del vars(new)["__wrapped__"]  # which `update_wrapper` has set
        new.__defaults__ = item.__defaults__ and self.rebound(item.__defaults__)
        new.__kwdefaults__ = item.__kwdefaults__ and self.rebound(item.__kwdefaults__)
        vars(new).update({key: self.rebound(value) for key, value in vars(item).items()})
        for cell, content in _filled(item):
            if id(cell) in cells:
                cells[id(cell)].cell_contents = self.rebound(content)
        return new

    def _leads_into_the_tree(self, value: Any) -> bool:
        return any(id(item) in self._table for item in reached(value))


CYCLES = "_dataparallel_cycles"
"""Attribute of a replica's root: its `ReferenceCycles`, which refer to the replica weakly."""


class ReferenceCycles:
    """Attributes of the replicas of one call through which a replica may lead back to itself.

    A bound method or a reference to the parent does so, and a replica's copies of all weights would live until the
    garbage collector runs. The attributes are deleted when nothing needs the replicas any more. Then reference counting
    frees what nobody else refers to. Code that refers to a part of a replica for longer finds the part whole but for
    these attributes.

    Three kinds of `Hold` tell who needs the replicas. The *call* does while it runs. A graph does, because a checkpoint
    may run methods of the replicas again: as long as *backward* may still run on the slots, and as long as nodes of the
    call's *output* lead there. A replica leads to its graph itself, so neither of the last two would be enough.

    Holds may be dropped in any thread, by the garbage collector too. So nothing here waits for a lock.
    """

    def __init__(self) -> None:
        self._attributes: list[tuple[weakref.ref[nn.Module], Sequence[str]]] = []
        self._holds: dict[str, set[int]] = {"call": set(), "backward": set()}  # ids; "output" once there is one

    def add(self, module: nn.Module, names: Sequence[str]) -> None:
        self._attributes.append((weakref.ref(module), names))

    def hold(self, kind: Literal["call", "backward", "output"]) -> Hold:
        return Hold(self, self._holds.setdefault(kind, set()))

    @property
    def are_held_by_graph(self) -> bool:
        return bool(self._holds["backward"])

    def break_unless_needed(self) -> None:
        """Deletes the attributes if no hold keeps them. Two threads may do this at the same time."""
        holds = self._holds
        if holds["call"] or (holds["backward"] and ("output" not in holds or holds["output"])):
            return
        attributes, self._attributes = self._attributes, []
        for reference, names in attributes:
            module = reference()
            if module is not None:
                own = vars(module)
                own.update((name, OrderedDict()) for name in names if name in HOOK_TABLES)
                for name in names:
                    if name not in HOOK_TABLES:
                        own.pop(name, None)


class Hold:
    """Keeps the attributes of `ReferenceCycles` as they are, as long as this object lives."""

    __slots__ = ("_cycles", "_holds")

    def __init__(self, cycles: ReferenceCycles, holds: set[int]) -> None:
        self._cycles, self._holds = cycles, holds
        holds.add(id(self))

    def __del__(self) -> None:
        self._holds.discard(id(self))
        self._cycles.break_unless_needed()


def cycles_of(replicas: Iterable[Any]) -> list[ReferenceCycles]:
    found = (vars(replica).get(CYCLES) for replica in replicas)
    return [*{id(cycles): cycles for cycles in found if cycles is not None}.values()]


def hold_by_output(cycles: Sequence[ReferenceCycles], tensors: Iterable[Tensor]) -> None:
    """Has the graph of a call's output hold ``cycles``, until no node of these ``tensors`` is left."""
    holds = [each.hold("output") for each in cycles]
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[id(holds)] = holds  # type: ignore[index]  # torch's hints say that it is a method
