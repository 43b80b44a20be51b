"""Who else holds an object: the one room that counts references.

What one call has used, the next one may use again if nobody else has it. Where something can be lent, whoever has it
holds a lease (``kept.replicas``, inside ``frozen``). A lease does not do for what ``forward`` gets into its hands and
may return, store or put into a graph. There the holders are counted, by the questions below, and each of them is about
holders that have come since: counts are compared with counts that this process has read in the same way, and never with
constants. An interpreter that lends its references (3.14 does) lends those that somebody else holds, who is counted.

Whether this is so here is tried once, when the room is imported: holders of every kind are added to objects of every
kind, and counts have to tell. If one goes unnoticed, or if ``DATAPARALLEL_REUSE=0`` is in the environment then, counts
are not trusted: the answer to every question is that somebody else may hold the object. So each call makes replicas and
copies of its own, and circles are left to the garbage collector. Results are the same. `why_not` says which of the two
it is.

Callers: ``kept.replicas``, ``kept.tensors`` and ``modules.cycles``. This room knows nothing of theirs.
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

__all__ = [
    "VARIABLE",
    "Holders",
    "MemoryHolders",
    "are_in_one_list_only",
    "are_weakly_held",
    "can_be_told",
    "references",
    "references_inside",
    "references_of_one",
    "why_not",
]

VARIABLE = "DATAPARALLEL_REUSE"
"""Environment variable, read at import: ``0`` has nothing used again that only counts could tell to be free."""


def can_be_told() -> bool:
    """Whether counts tell here who holds an object."""
    return _why_not is None


def why_not() -> str | None:
    """The reason why counts are not trusted, or ``None`` if they are."""
    return _why_not


class Holders:
    """Who holds the objects in some lists at this moment; the lists are not copied, and should stay as they are."""

    def __init__(self, *lists: list[Any]) -> None:
        self._lists = lists
        self._counts = references(chain.from_iterable(lists))

    def are_the_same(self) -> bool:
        """``False`` if somebody holds one of the objects who did not then, or the other way round."""
        return _why_not is None and references(chain.from_iterable(self._lists)) == self._counts


class MemoryHolders:
    """Which tensors share the memory of some tensors at this moment, and who holds the storages themselves."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._counts = [*map(_holders_of_memory, self._tensors)]

    def are_the_same(self) -> bool:
        """``False`` if there are others: views and detached tensors, in graphs and in ``.grad`` too."""
        return _why_not is None and [*map(_holders_of_memory, self._tensors)] == self._counts


def are_in_one_list_only(tensors: list[Tensor]) -> bool:
    """Whether nobody has one of ``tensors``, or could come to have one, but through this list."""
    if _why_not is not None:
        return False
    count_of_one, uses_of_one = _one_tensor()
    return (
        references(tensors).count(count_of_one) == len(tensors)
        and _uses(tensors).count(uses_of_one) == len(tensors)
        and not are_weakly_held(tensors)
    )


def are_weakly_held(objects: Iterable[Any]) -> bool:
    """Whether there is a weak reference or a proxy to one of ``objects``. Counts do not need to be trusted for that."""
    return any(map(weakref.getweakrefcount, objects))


def references(objects: Iterable[Any]) -> list[int]:
    """How many references there are to each of ``objects``, `references_of_one` for what is in one list only.

    Whether these numbers can be trusted is for the caller to ask.
    """
    return [*map(sys.getrefcount, objects)]


def references_of_one() -> int:
    """What `references` finds for an object that is in the list that it is given, and nowhere else."""
    (count,) = references([object()])
    return count


def references_inside(holders: Iterable[Any]) -> Counter[int]:
    """How many references ``holders`` have to each object, by its id."""
    return Counter(id(held) for holder in holders for held in gc.get_referents(holder))


def _uses(tensors: list[Tensor]) -> list[int]:
    """How many references to each tensor there are outside of Python: from views, from graphs."""
    return [*map(_torch.use_count, tensors)]


def _holders_of_memory(tensor: Tensor) -> tuple[int, int]:
    """How many tensors share the memory of ``tensor``, and how many references to it Python has."""
    storage = tensor.untyped_storage()  # the same object for all who ask
    return _torch.storage_use_count(_torch.storage_address(storage)), sys.getrefcount(storage)


@cache
def _one_tensor() -> tuple[int, int]:
    """References to a tensor that is in one list, from Python and from elsewhere."""
    tensors = [_tensor()]
    (count,), (uses,) = references(tensors), _uses(tensors)
    return count, uses


def _tensor() -> Tensor:
    return torch.empty(2, device="cpu")  # whatever the default device is


# The trial.

_Hold: TypeAlias = Callable[[Any], Any]
"""From an object to one more holder of it."""


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

# How an object is made, the question about a list of it, and holders that have to change the answer.
_OBJECTS: list[tuple[Callable[[], Any], Callable[[list[Any]], _Question], dict[str, _Hold]]] = [
    (nn.Identity, lambda items: Holders(items).are_the_same, _HOLD),
    (set, lambda items: Holders(items).are_the_same, _HOLD),
    (dict, lambda items: Holders(items).are_the_same, _HOLD_A_TABLE),
    (OrderedDict, lambda items: Holders(items).are_the_same, _HOLD_A_TABLE),
    (lambda: _tensor().requires_grad_(), lambda items: partial(are_in_one_list_only, items), _HOLD_A_TENSOR),
    (lambda: nn.Parameter(_tensor()), lambda items: partial(are_in_one_list_only, items), _HOLD_A_TENSOR),
]


def _unnoticed() -> str | None:
    """The first holder that counts do not tell of, and what it holds; ``None`` if there is none."""
    for make, ask, holders in _OBJECTS:
        items = [make()]
        question, kind = ask(items), type(items[0]).__name__
        for name, hold in holders.items():
            if not _is_noticed(items, question, hold):
                return f"{name} that holds a {kind}"
        if _answer_to_a_caller_with(items, question):
            return f"a running function that holds a {kind}"
    tensors = [_tensor()]
    question = MemoryHolders(tensors).are_the_same
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
    """Whether the answer is yes, no while somebody holds one of ``items`` too, and yes again."""
    before = question()
    holder = hold(items[at])
    meanwhile = question()
    del holder
    return before and not meanwhile and question()


def _answer_to_a_caller_with(items: list[Any], question: _Question) -> bool:
    """The answer while who asks has been given an item by a caller who has it too."""
    item = items[0]
    return _answer_with(item, question)


def _answer_with(item: Any, question: _Question) -> bool:
    return question()


def _circle() -> list[Any]:
    """A module and what leads back to it, in the ways of a replica's attributes; these are last."""
    module = nn.Identity()
    function = _in_a_closure(module)
    method, part, table = types.MethodType(function, module), partial(len, [module]), [module]
    attributes = {"function": function, "method": method, "part": part, "table": table}
    object.__setattr__(module, "__dict__", attributes)
    closure = function.__closure__ or ()
    return [module, function, closure, *closure, method, part, part.args, *part.args, table, attributes]


def _is_closed(parts: list[Any]) -> bool:
    """Whether parts of a circle are referenced by each other only. The module is known to hold its attributes."""
    inside = references_inside(parts[1:])
    inside[id(parts[-1])] += 1
    alone = references_of_one()
    return references(parts) == [inside[name] + alone for name in map(id, parts)]


def _try() -> str | None:
    """See `why_not`."""
    if says_no(VARIABLE):
        return f"{VARIABLE}={os.environ[VARIABLE]} says so"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # What a thread holds and hands to another may be seen with neither of them.
        return "this Python can run without a global lock, and counts may change while they are read"
    try:
        # Wherever this package is imported.
        with torch.inference_mode(False), torch.enable_grad():
            cls = type(_tensor())
            if cls is not Tensor:
                return f"the package was imported where torch makes tensors of another class, {cls.__name__}"
            unnoticed = _unnoticed()
    except Exception as error:  # a name that is private to torch may be gone; `why_not` tells
        return f"they cannot be read with torch {torch.__version__}: {type(error).__name__}: {error}"
    return None if unnoticed is None else f"they do not tell of {unnoticed}"


_why_not: str | None = None  # while they are tried
_why_not = _try()
