"""Does anybody else hold an object? This is the only room that counts references.

A user's ``forward`` may return replicas and copies, store them or put them into a graph, and no lease tells that.
At import the room tries whether counts can be trusted. If not, every question is answered as if somebody else held the
object: each call makes its own replicas and copies, and cycles are left to the collector. Results are the same.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dataparallel import _torch
from dataparallel.environment import says_no

VARIABLE = "DATAPARALLEL_REUSE"
"""Environment variable, read at import. ``0``: nothing is used again on the evidence of reference counts."""


def are_counts_trusted() -> bool:
    """True if reference counts show here who holds an object."""
    return why_not_trusted() is None


def why_not_trusted() -> str | None:
    """The reason why reference counts are not trusted; ``None`` if they are."""
    return _why_not_trusted


class Holders:
    """Counts who holds the objects in some lists now. It keeps the lists themselves, which must not change."""

    def __init__(self, *lists: list[Any]) -> None:
        self._lists = lists
        self._counts = references(chain.from_iterable(lists))

    def are_unchanged(self) -> bool:
        """``False`` if one of the objects has gained or lost a holder since."""
        return are_counts_trusted() and references(chain.from_iterable(self._lists)) == self._counts


class MemoryHolders:
    """Counts who shares the memory of some tensors now: other tensors, and holders of the storages."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._counts = [*map(holders_of_memory, self._tensors)]

    def are_unchanged(self) -> bool:
        """``False`` if the memory has gained or lost a holder since: a view, a graph, a ``.grad``."""
        return are_counts_trusted() and [*map(holders_of_memory, self._tensors)] == self._counts


def are_in_one_list_only(tensors: list[Tensor]) -> bool:
    """True if nothing but this list refers to ``tensors``, weak references included."""
    if not are_counts_trusted():
        return False
    count_of_one, uses_of_one = _one_tensor()
    return (
        references(tensors).count(count_of_one) == len(tensors)
        and _uses(tensors).count(uses_of_one) == len(tensors)
        and not are_weakly_held(tensors)
    )


def are_weakly_held(objects: Iterable[Any]) -> bool:
    """True if there is a weak reference or a proxy to one of ``objects``."""
    return any(weak_references(objects))


def weak_references(objects: Iterable[Any]) -> list[int]:
    """The number of weak references and proxies to each of ``objects``. This does not depend on trusted counts."""
    return [*map(weakref.getweakrefcount, objects)]


def references(objects: Iterable[Any]) -> list[int]:
    """The number of references to each of ``objects``. The caller asks `are_counts_trusted`."""
    return [*map(sys.getrefcount, objects)]


def references_of_one() -> int:
    """The number that `references` returns for an object that only the given list refers to."""
    (count,) = references([object()])
    return count


def references_inside(holders: Iterable[Any]) -> Counter[int]:
    """The number of references from ``holders`` to each object, by the object's id."""
    return Counter(id(held) for holder in holders for held in gc.get_referents(holder))


def holders_of_memory(tensor: Tensor) -> tuple[int, int]:
    """The number of tensors on the memory of ``tensor``, and of references from Python to its storage."""
    storage = tensor.untyped_storage()  # the same object at every access
    return _torch.storage_use_count(_torch.storage_address(storage)), sys.getrefcount(storage)


def _uses(tensors: list[Tensor]) -> list[int]:
    """The number of references to each tensor from outside of Python: from views, from graphs."""
    return [*map(_torch.use_count, tensors)]


@cache
def _one_tensor() -> tuple[int, int]:
    """The numbers of references to a tensor that only one list refers to: from Python, and from elsewhere."""
    tensors = [_tensor()]
    (count,), (uses,) = references(tensors), _uses(tensors)
    return count, uses


def _tensor() -> Tensor:
    return torch.empty(2, device="cpu")  # not the default device


# The trial: functions that add a holder, and the questions whose answers the holder has to change. A count is compared
# only with one that this process has read in the same way before: Python 3.14 borrows references from other holders
# instead of counting them.

_Hold: TypeAlias = Callable[[Any], Any]
"""Takes an object and returns one more holder of it."""


def _in_a_closure(item: Any) -> Callable[[], Any]:
    return lambda: item


def _in_a_frame(item: Any) -> Iterator[None]:
    def suspended(item: Any) -> Iterator[None]:
        yield
        del item

    frame = suspended(item)
    next(frame)
    return frame


def _in_a_module(table: dict[str, Any]) -> nn.Module:
    module = nn.Identity()
    object.__setattr__(module, "__dict__", table)
    return module


def _in_a_gradient(tensor: Tensor) -> Tensor:
    leaf = _tensor()
    leaf.grad = tensor.detach()
    return leaf


def _in_a_graph(tensor: Tensor) -> Tensor:
    leaf = tensor.detach().requires_grad_()
    return leaf * leaf


_HOLD: dict[str, _Hold] = {
    "a list": lambda item: [item],
    "a tuple": lambda item: (item,),
    "a dict": lambda item: {"item": item},
    "an attribute": lambda item: types.SimpleNamespace(item=item),
    "a closure": _in_a_closure,
    "a suspended frame": _in_a_frame,
    "a bound method": lambda item: types.MethodType(_in_a_closure, item),
}
_HOLD_A_TABLE: dict[str, _Hold] = {
    **_HOLD,
    "a view of its values": lambda table: table.values(),
    "an iterator": lambda table: iter(table.items()),
    "a module": _in_a_module,
}
_HOLD_A_TENSOR: dict[str, _Hold] = {
    **_HOLD,
    "a view": lambda tensor: tensor.view(-1),
    "a graph": lambda tensor: tensor * tensor,
    "a weak reference": weakref.ref,
}
_HOLD_MEMORY: dict[str, _Hold] = {
    "a view": lambda tensor: tensor.view(-1),
    "a detached tensor": Tensor.detach,
    "its data": lambda tensor: tensor.data,
    "a graph": _in_a_graph,
    "a gradient": _in_a_gradient,
    "its storage": Tensor.untyped_storage,
}


_Question: TypeAlias = Callable[[], bool]

# How to make an object, the question about a list with it, and the holders that have to change the answer.
_OBJECTS: list[tuple[Callable[[], Any], Callable[[list[Any]], _Question], dict[str, _Hold]]] = [
    (nn.Identity, lambda items: Holders(items).are_unchanged, _HOLD),
    (set, lambda items: Holders(items).are_unchanged, _HOLD),
    (dict, lambda items: Holders(items).are_unchanged, _HOLD_A_TABLE),
    (OrderedDict, lambda items: Holders(items).are_unchanged, _HOLD_A_TABLE),
    (lambda: _tensor().requires_grad_(), lambda items: partial(are_in_one_list_only, items), _HOLD_A_TENSOR),
    (lambda: nn.Parameter(_tensor()), lambda items: partial(are_in_one_list_only, items), _HOLD_A_TENSOR),
]


def _missed_holder() -> str | None:
    """The first holder that counts miss, and what it holds; ``None`` if they miss none."""
    for make, ask, holders in _OBJECTS:
        items = [make()]
        question, kind = ask(items), type(items[0]).__name__
        for name, hold in holders.items():
            if not _is_noticed(items, question, hold):
                return f"{name} that holds a {kind}"
        if _ask_from_a_caller_with(items, question):
            return f"a running function that holds a {kind}"
    tensors = [_tensor()]
    question = MemoryHolders(tensors).are_unchanged
    for name, hold in _HOLD_MEMORY.items():
        if not _is_noticed(tensors, question, hold):
            return f"{name} that holds the memory of a tensor"
    parts = _circle()
    question = partial(_is_closed, parts)
    for at, cls in enumerate([*map(type, parts)]):
        if not _is_noticed(parts, question, _in_a_frame, at):
            return f"a suspended frame that holds a {cls.__name__} of a circle"
    parts[-1].clear()
    return None


def _is_noticed(items: list[Any], question: _Question, hold: _Hold, at: int = 0) -> bool:
    """True if the answer is yes, then no while something else holds an item too, then yes again."""
    before = question()
    holder = hold(items[at])
    meanwhile = question()
    del holder
    return before and not meanwhile and question()


def _ask_from_a_caller_with(items: list[Any], question: _Question) -> bool:
    """The answer while an item is a local variable and an argument of a running function."""
    item = items[0]
    return _ask_with(item, question)


def _ask_with(item: Any, question: _Question) -> bool:
    return question()


def _circle() -> list[Any]:
    """A module and objects that lead back to it, as a replica's attributes do. The attributes are the last item."""
    module = nn.Identity()
    function = _in_a_closure(module)
    method, part, table = types.MethodType(function, module), partial(len, [module]), [module]
    attributes = {"function": function, "method": method, "part": part, "table": table}
    object.__setattr__(module, "__dict__", attributes)
    closure = function.__closure__ or ()
    return [module, function, closure, *closure, method, part, part.args, *part.args, table, attributes]


def _is_closed(parts: list[Any]) -> bool:
    """True if only the parts of a circle refer to each other. The module holds its attributes."""
    inside = references_inside(parts[1:])
    inside[id(parts[-1])] += 1
    alone = references_of_one()
    return references(parts) == [inside[name] + alone for name in map(id, parts)]


def try_counts() -> str | None:
    """Tries whether reference counts can be trusted. Returns why not, or ``None``."""
    if says_no(VARIABLE):
        return f"{VARIABLE}={os.environ[VARIABLE]} says so"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # While one thread hands an object to another, a count may show neither of them.
        return "this Python can run without a global lock, and counts may change while they are read"
    try:
        # The package may be imported inside other modes.
        with torch.inference_mode(False), torch.enable_grad():
            cls = type(_tensor())
            if cls is not Tensor:
                return f"the package was imported where torch makes tensors of another class, {cls.__name__}"
            missed = _missed_holder()
    except Exception as error:  # torch may lack a private name; the report shows it
        return f"they cannot be read with torch {torch.__version__}: {type(error).__name__}: {error}"
    return None if missed is None else f"they miss {missed}"


_why_not_trusted: str | None = None  # during the trial
_why_not_trusted = try_counts()
